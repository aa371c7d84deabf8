"""The GPU's twins of the ops, in Triton. Other ops are inherited from `Ops`: cuBLAS computes GEMMs.

`minisgl_kernels.ops` has faster GEMMs, and filters without a sort.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minisgl.core import BatchSamplingArgs
from minisgl.kernel.ops import Activation, Ops
from minisgl.kernel.triton import elementwise, moe_route, sample, step, store

if TYPE_CHECKING:
    from minisgl.kvcache.pool import LayerPool


class CudaOps(Ops):
    """Its ops can be captured in a CUDA graph: none waits for the device."""

    name = "triton"

    def embed_share(self, ids_T: Tensor, weight_LD: Tensor, share: range) -> Tensor:
        return step.embed_share(ids_T, weight_LD, share)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return elementwise.rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return elementwise.add_rms_norm(x, residual, weight, eps)

    def gated(self, gate_up: Tensor, gate: Activation) -> Tensor:
        return elementwise.gated(gate_up, silu=gate == "silu")

    def route(self, logits_TE: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
        return moe_route.route(logits_TE, top_k, renormalise)

    def store_kv(self, k_TKH: Tensor, v_TKH: Tensor, slots_T: Tensor, pool: LayerPool) -> None:
        store.store_kv(k_TKH, v_TKH, slots_T, pool)

    def take_ids(self, token_ids_T: Tensor, table_idxs_D: Tensor, last_token_R: Tensor) -> Tensor:
        return step.take_ids(token_ids_T, table_idxs_D, last_token_R)

    def write_pages(self, page_table_RP: Tensor, new_pages_3N: Tensor) -> None:
        step.write_pages(page_table_RP, new_pages_3N)

    def logits(self, x_SD: Tensor, weight_LD: Tensor) -> Tensor:
        if x_SD.dtype == torch.float32 or not x_SD.is_cuda:  # interpreted kernels run on a CPU
            return super().logits(x_SD, weight_LD)
        return torch.mm(x_SD, weight_LD.t(), out_dtype=torch.float32)

    def mask(self, logits_SV: Tensor, rows_M: Tensor, masks_MW: Tensor) -> Tensor:
        return sample.mask(logits_SV, rows_M, masks_MW)

    def sample(self, logits_SV: Tensor, args: BatchSamplingArgs) -> Tensor:
        if args.all_greedy:
            return sample.choose(logits_SV)
        if any(x is not None for x in (args.top_ks, args.top_ps, args.min_ps)):
            return super().sample(logits_SV, args)  # sorts
        return sample.choose(logits_SV, args.temperatures, args.seeds, args.output_idxs)


def num_cores(device: torch.device) -> int:
    """Return the number of multiprocessors of a CUDA device."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
