"""Plain experts on a GPU: GEMVs for few tokens, our grouped GEMMs on Hopper for many pairs, and the
core's fused Triton kernels for the others."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from minisgl.kernel.ops import Ops
from minisgl.kernel.triton.moe import Gemm
from minisgl.moe.base import Experts
from minisgl.moe.fused import FusedMoeBackend, gate_of
from minisgl_kernels.grouped import GroupedGemms
from minisgl_kernels.hopper import on_hopper
from minisgl_kernels.triton import moe_few

FEW_TOKENS = 2
"""Up to this many tokens, each program reads an expert's weights for only one token."""
FEWEST_GROUPED = 32
"""From this many pairs for each expert on, on average, our GEMMs for Hopper are faster."""


class TunedMoeBackend(FusedMoeBackend):
    def __init__(self, ops: Ops, grouped: GroupedGemms | None = None) -> None:
        """grouped: our GEMMs for Hopper; None leaves all GEMMs to Triton."""
        super().__init__(ops)
        self._grouped = grouped

    def _routed(
        self,
        x_TD: Tensor,
        weights_TK: Tensor,
        ids_TK: Tensor,
        experts: Experts,
        counts_L: Tensor,
    ) -> Tensor:
        if len(x_TD) > FEW_TOKENS:
            return super()._routed(x_TD, weights_TK, ids_TK, experts, counts_L)
        return moe_few.experts_of_few(
            x_TD,
            experts.gate_up_LGD,
            experts.down_LDF,
            weights_TK,
            ids_TK,
            experts.first,
            gate=gate_of(experts),
            up_bias_LG=experts.gate_up_bias,
            down_bias_LD=experts.down_bias,
        )

    def _gemms(self, x_TD: Tensor, experts: Experts, mean: float) -> tuple[Gemm, Gemm]:
        if (
            self._grouped
            and (gate := experts.plain_gate)
            and mean >= FEWEST_GROUPED
            and self._grouped.takes(x_TD, experts.gate_up_LGD, experts.down_LDF, gate)
        ):
            return partial(self._grouped.gemm, gate=gate), self._grouped.gemm
        return super()._gemms(x_TD, experts, mean)


def create_backend(ops: Ops, dtype: torch.dtype) -> TunedMoeBackend:
    """Return the backend of `ops` on the current GPU. dtype: see `create_moe_backend`."""
    otherwise = "Triton computes the experts' GEMMs of many rows"
    return TunedMoeBackend(ops, on_hopper(partial(GroupedGemms, dtype), otherwise))
