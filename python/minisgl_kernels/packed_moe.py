"""Quantised experts on a GPU, with kernels that decode the weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from minisgl.kernel.ops import Ops
from minisgl.kernel.triton import moe
from minisgl.moe.base import BaseMoeBackend, Experts, TorchMoeBackend
from minisgl.moe.fused import gate_of
from minisgl_kernels.fp8_grouped import Fp8Grouped
from minisgl_kernels.hopper import on_hopper
from minisgl_kernels.moe import FEW_TOKENS
from minisgl_kernels.packed_grouped import PackedGrouped
from minisgl_kernels.triton import packed_gemv
from minisgl_kernels.triton.moe_gate import activate_pairs
from minisgl_kernels.triton.packed_gemm import TileConfig, expert_gemm
from minisgl_zoo.weights.quantised import Packed

FEWEST_8_BIT = 8
"""From this many pairs for each expert on, on average, `PackedGrouped` is faster than Triton with 8
bits. With 4 bits it always is. A layer of Qwen3-30B-A3B in fp8 takes it 197 us and Triton 180 for
64 tokens, 210 and 231 for 256 (one H200); not measured between."""


class PackedMoeBackend(BaseMoeBackend):
    """On Hopper, computes steps of few tokens with our skinny GEMMs
    (`minisgl_kernels.packed_skinny`) and others with our grouped ones
    (`minisgl_kernels.fp8_grouped`, `minisgl_kernels.packed_grouped`); elsewhere in Triton. Experts
    of a format without kernels are computed in the loop over experts."""

    def __init__(
        self, ops: Ops, fp8: Fp8Grouped | None = None, grouped: PackedGrouped | None = None
    ) -> None:
        """fp8, grouped: our GEMMs for Hopper; None leaves them to Triton."""
        super().__init__(ops)
        self._fp8, self._grouped = fp8, grouped

    def routed(self, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, experts: Experts) -> Tensor:
        gate_up = getattr(experts.gate_up, "packed_stack", None)
        down = getattr(experts.down, "packed_stack", None)
        if gate_up is None or down is None:
            return TorchMoeBackend(self.ops).routed(x_TD, weights_TK, ids_TK, experts)
        if not len(x_TD):  # of the last layer, in a step that samples nothing
            return x_TD
        skinny = None if experts.is_squared else getattr(self.ops, "packed_skinny", None)
        biases = (experts.gate_up_bias, experts.down_bias)
        of_pairs = skinny and skinny.experts(
            x_TD, gate_up, down, weights_TK, ids_TK, experts.first, gate_of(experts), biases
        )
        if of_pairs is not None:
            return moe.total(of_pairs, weights_TK, ids_TK, experts.first, experts.count)
        if len(x_TD) <= FEW_TOKENS and experts.is_plain:
            return packed_gemv.experts_of_few(
                x_TD, gate_up, down, weights_TK, ids_TK, experts.first
            )
        gate = gate_of(experts)
        mean = ids_TK.numel() / experts.total  # pairs that an expert gets
        gemms: tuple[Any, Any] = (
            partial(_up, mean=mean, ids_TK=ids_TK, experts=experts), partial(_down, mean=mean)
        )  # fmt: skip
        if self._fp8 and biases[0] is None and self._fp8.takes(x_TD, gate_up, down, gate):
            gemms = (partial(self._fp8.gemm, gate=gate), self._fp8.gemm)
        elif self._grouped and (gate_up.is_4_bit or mean >= FEWEST_8_BIT):
            of_pairs = self._grouped.experts(
                x_TD, gate_up, down, weights_TK, ids_TK, experts.first, gate, biases[0]
            )
            if of_pairs is not None:
                return moe.total(
                    of_pairs, weights_TK, ids_TK, experts.first, experts.count, biases[1]
                )
        counts_L = torch.zeros(experts.count, dtype=torch.int32, device=x_TD.device)
        # Kernels take a packed stack where others take a tensor.
        stacks: tuple[Any, Any] = (gate_up, down)
        return moe.experts(
            x_TD, *stacks, weights_TK, ids_TK, experts.first, counts_L,
            up=gemms[0], down=gemms[1], down_bias_LD=experts.down_bias,
        )  # fmt: skip


def create_backend(ops: Ops, dtype: torch.dtype) -> PackedMoeBackend:
    """Return the backend of `ops` on the current GPU."""
    otherwise = "Triton computes the experts' GEMMs by packed weights"
    grouped: PackedGrouped | None = getattr(ops, "packed_grouped", None)
    return PackedMoeBackend(ops, on_hopper(Fp8Grouped, otherwise), grouped)


def choose_tile(weight: Packed, mean: float) -> TileConfig:
    """Return the tiles for `mean` pairs of an expert, on average."""
    k = weight.group if 32 <= weight.group <= 128 else 128
    m = next((m for m in (16, 32, 64) if mean <= m // 2), 64)
    return TileConfig(m=m, n=64, k=k)


def _up(
    x: Tensor, weight: Any, counts_L: Tensor, rows_LT: Tensor, _: None, out: Tensor,
    *, mean: float, ids_TK: Tensor, experts: Experts,
) -> None:  # fmt: skip
    """Compute gate and up with their biases, and write the activation to out. A `Gemm` of
    `moe.experts`."""
    if experts.is_squared:
        expert_gemm(x, weight, counts_L, rows_LT, None, out, choose_tile(weight, mean))
        out.relu_().square_()
        return
    both = torch.empty((len(out), 2 * out.shape[1]), dtype=out.dtype, device=out.device)
    expert_gemm(x, weight, counts_L, rows_LT, None, both, choose_tile(weight, mean))
    held = range(experts.first, experts.first + experts.count)
    bias_LG = experts.gate_up_bias
    activate_pairs(both, ids_TK, held, out, gate=gate_of(experts), bias_LG=bias_LG)


def _down(
    x: Tensor, weight: Any, counts_L: Tensor, rows_LT: Tensor, scales: Any, out: Tensor,
    *, mean: float,
) -> None:  # fmt: skip
    expert_gemm(x, weight, counts_L, rows_LT, scales, out, choose_tile(weight, mean))
