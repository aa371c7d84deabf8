"""Quantised experts on a GPU: as `minisgl.moe.fused`, with kernels that decode the weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from minisgl.kernel.ops import Ops
from minisgl.kernel.triton import elementwise, moe, packed_gemv
from minisgl.kernel.triton.packed import Packed
from minisgl.kernel.triton.packed_product import Cut, expert_product
from minisgl.moe.base import BaseMoeBackend, Experts, TorchMoeBackend
from minisgl.moe.fused import FusedMoeBackend

FEW_TOKENS = 2
"""Up to so many, a program reads an expert's weights for one token alone."""


class PackedMoeBackend(BaseMoeBackend):
    """Experts of a format without such kernels go through the loop over experts. Those that are not
    plain (gpt-oss's) are dequantised whole in each step, as these kernels have no biases."""

    def __init__(self, ops: Ops) -> None:
        super().__init__(ops)
        self._dense = FusedMoeBackend(ops)

    def routed(self, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, experts: Experts) -> Tensor:
        if not experts.is_plain:
            return self._dense.routed(x_TD, weights_TK, ids_TK, experts)
        gate_up = getattr(experts.gate_up, "packed_stack", None)
        down = getattr(experts.down, "packed_stack", None)
        if gate_up is None or down is None:
            return TorchMoeBackend(self.ops).routed(x_TD, weights_TK, ids_TK, experts)
        if len(x_TD) <= FEW_TOKENS:
            return packed_gemv.experts_of_few(
                x_TD, gate_up, down, weights_TK, ids_TK, experts.first
            )
        counts_L = torch.zeros(experts.count, dtype=torch.int32, device=x_TD.device)
        mean = ids_TK.numel() / experts.total  # pairs that an expert gets
        # Kernels take a packed stack where others take a tensor.
        stacks: tuple[Any, Any] = (gate_up, down)
        return moe.experts(
            x_TD, *stacks, weights_TK, ids_TK, experts.first, counts_L,
            up=partial(_up, mean=mean), down=partial(_down, mean=mean),
        )  # fmt: skip


def choose_cut(weight: Packed, mean: float) -> Cut:
    """For so many pairs of an expert, on average."""
    k = weight.group if 32 <= weight.group <= 128 else 128
    m = next((m for m in (16, 32, 64) if mean <= m // 2), 64)
    return Cut(m=m, n=64, k=k)


def _up(
    x: Tensor, weight: Any, counts_L: Tensor, rows_LT: Tensor, _: None, out: Tensor, *, mean: float
) -> None:
    """silu(gate) * up, in place."""
    both = torch.empty((len(out), 2 * out.shape[1]), dtype=out.dtype, device=out.device)
    expert_product(x, weight, counts_L, rows_LT, None, both, choose_cut(weight, mean))
    elementwise.gated(both, silu=True, out=out)


def _down(
    x: Tensor, weight: Any, counts_L: Tensor, rows_LT: Tensor, scales: Any, out: Tensor,
    *, mean: float,
) -> None:  # fmt: skip
    expert_product(x, weight, counts_L, rows_LT, scales, out, choose_cut(weight, mean))
