"""The GPU's twins of the ops, in Triton and CUDA. Other ops are inherited from `Ops`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from minisgl.core import BatchSamplingArgs
from minisgl.kernel.ops import Activation, Ops
from minisgl.kernel.triton import (
    elementwise,
    embed,
    mask,
    moe_route,
    sample,
    step,
    store,
    threshold,
)
from minisgl_kernels.packed_skinny import PackedSkinny
from minisgl_kernels.skinny import SkinnyGemms
from minisgl_kernels.triton import gemv

if TYPE_CHECKING:
    import torch

    from minisgl.kvcache.pool import LayerPool


class CudaOps(Ops):
    """Its ops can be captured in a CUDA graph: none waits for the device."""

    name = "triton"

    def __init__(
        self, skinny: SkinnyGemms | None = None, packed_skinny: PackedSkinny | None = None
    ) -> None:
        """skinny: for GEMMs of more than two rows; None leaves them to cuBLAS. packed_skinny: the
        same for packed weights; None leaves them to Triton."""
        self._skinny = skinny
        self.packed_skinny = packed_skinny

    def embed_share(self, ids_T: Tensor, weight_LD: Tensor, share: range) -> Tensor:
        return embed.embed_share(ids_T, weight_LD, share)

    def linear(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        gate: Activation | None = None,
    ) -> Tensor:
        if x.dim() == 2 and gemv.takes(*x.shape) and x.is_contiguous():
            return gemv.norm_linear(x, None, None, 0.0, weight, bias, gate)[0]
        if self._skinny and (config := self._skinny.config(x, weight, gated=gate == "silu")):
            y = self._skinny.linear(x, weight, bias, config)
            return self.gated(y, gate) if gate and not config.gated else y
        return super().linear(x, weight, bias, gate)

    def norm_linear(
        self,
        x: Tensor,
        residual: Tensor | None,
        norm_weight: Tensor | None,
        eps: float,
        weight: Tensor,
        bias: Tensor | None,
        gate: Activation | None = None,
    ) -> tuple[Tensor, Tensor]:
        if gemv.takes(*x.shape):
            return gemv.norm_linear(x, residual, norm_weight, eps, weight, bias, gate)
        return super().norm_linear(x, residual, norm_weight, eps, weight, bias, gate)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return elementwise.rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return elementwise.add_rms_norm(x, residual, weight, eps)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return elementwise.gated(gate_up, silu=True)

    def gelu_and_mul(self, gate_up: Tensor) -> Tensor:
        return elementwise.gated(gate_up, silu=False)

    def route(self, logits_TE: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
        return moe_route.route(logits_TE, top_k, renormalise)

    def store_kv(self, k_TKH: Tensor, v_TKH: Tensor, slots_T: Tensor, pool: LayerPool) -> None:
        store.store_kv(k_TKH, v_TKH, slots_T, pool)

    def take_ids(self, token_ids_T: Tensor, table_idxs_D: Tensor, last_token_R: Tensor) -> Tensor:
        return step.take_ids(token_ids_T, table_idxs_D, last_token_R)

    def write_pages(self, page_table_RP: Tensor, new_pages_3N: Tensor) -> None:
        step.write_pages(page_table_RP, new_pages_3N)

    def logits(self, x_SD: Tensor, weight_LD: Tensor) -> Tensor:
        import torch

        if gemv.takes(*x_SD.shape) and x_SD.is_contiguous():
            arguments = (None, None, 0.0, weight_LD, None, None)
            return gemv.norm_linear(x_SD, *arguments, out_dtype=torch.float32)[0]
        if self._skinny and (config := self._skinny.config(x_SD, weight_LD, wide=True)):
            return self._skinny.linear(x_SD, weight_LD, None, config)
        if x_SD.dtype == torch.float32 or not x_SD.is_cuda:  # interpreted kernels run on a CPU
            return super().logits(x_SD, weight_LD)
        return torch.mm(x_SD, weight_LD.t(), out_dtype=torch.float32)

    def mask(self, logits_SV: Tensor, rows_M: Tensor, masks_MW: Tensor) -> Tensor:
        return mask.mask(logits_SV, rows_M, masks_MW)

    def sample(self, logits_SV: Tensor, args: BatchSamplingArgs) -> Tensor:
        if args.all_greedy:
            return sample.choose(logits_SV)
        assert args.temperatures is not None
        filters = (args.top_ks, args.top_ps, args.min_ps)
        limits = None
        if any(x is not None for x in filters):
            limits = threshold.limits(logits_SV, args.temperatures, *filters)
        return sample.choose(logits_SV, args.temperatures, args.seeds, args.output_idxs, limits)


def num_cores(device: torch.device) -> int:
    """Return the number of multiprocessors of a CUDA device."""
    import torch

    return int(torch.cuda.get_device_properties(device).multi_processor_count)
