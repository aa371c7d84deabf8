"""The GPU's ops with tuned GEMMs of few rows: GEMVs, and on Hopper skinny GEMMs of up to 64 rows;
and with filters of sampling that do not sort.

Other ops are those of `CudaOps`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.core import BatchSamplingArgs
from minisgl.kernel.cuda import CudaOps
from minisgl.kernel.ops import Activation
from minisgl.kernel.triton import sample
from minisgl_kernels.hopper import on_hopper
from minisgl_kernels.packed_grouped import PackedGrouped
from minisgl_kernels.packed_skinny import PackedSkinny
from minisgl_kernels.skinny import SkinnyGemms
from minisgl_kernels.tile_grouped import TileGrouped
from minisgl_kernels.triton import gemv, threshold


class TunedOps(CudaOps):
    def __init__(
        self,
        skinny: SkinnyGemms | None = None,
        packed_skinny: PackedSkinny | None = None,
        packed_grouped: PackedGrouped | None = None,
        tile_grouped: TileGrouped | None = None,
    ) -> None:
        """skinny: for GEMMs of more than two rows; None leaves them to cuBLAS. packed_skinny,
        packed_grouped: for packed weights, by few rows and by more; None leaves them to Triton.
        tile_grouped: for weights of GGUF files by more rows than 8."""
        self._skinny = skinny
        self.packed_skinny, self.packed_grouped = packed_skinny, packed_grouped
        self.tile_grouped = tile_grouped

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

    def logits(self, x_SD: Tensor, weight_LD: Tensor) -> Tensor:
        if gemv.takes(*x_SD.shape) and x_SD.is_contiguous():
            arguments = (None, None, 0.0, weight_LD, None, None)
            return gemv.norm_linear(x_SD, *arguments, out_dtype=torch.float32)[0]
        if self._skinny and (config := self._skinny.config(x_SD, weight_LD, wide=True)):
            return self._skinny.linear(x_SD, weight_LD, None, config)
        return super().logits(x_SD, weight_LD)

    def sample(self, logits_SV: Tensor, args: BatchSamplingArgs) -> Tensor:
        filters = (args.top_ks, args.top_ps, args.min_ps)
        if args.temperatures is None or all(x is None for x in filters):
            return super().sample(logits_SV, args)
        limits = threshold.limits(logits_SV, args.temperatures, *filters)
        return sample.choose(logits_SV, args.temperatures, args.seeds, args.output_idxs, limits)


def create_ops() -> TunedOps:
    """Return the ops of the current GPU."""
    return TunedOps(
        on_hopper(SkinnyGemms, "cuBLAS computes skinny GEMMs"),
        on_hopper(PackedSkinny, "Triton computes skinny GEMMs by packed weights"),
        on_hopper(PackedGrouped, "Triton computes GEMMs of more rows by packed weights"),
        on_hopper(TileGrouped, "weights of GGUF files are dequantised for GEMMs of more rows"),
    )
