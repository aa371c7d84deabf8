"""The experts on a CPU: in C++ (`kernel/csrc/moe.cpp`) if each gets few tokens, else in torch."""

from __future__ import annotations

from torch import Tensor

from minisgl.kernel.cpu import CpuOps
from minisgl.moe.base import Experts, TorchMoeBackend

FEW_TOKENS = {2: 3, 4: 16}
"""Bytes of a number -> the most tokens that an expert may get, on average, in C++. With more tokens
the loop over experts is faster, because torch's GEMMs keep tiles of weights and tokens in the
caches (benchmarks/results/moe-cpu.json)."""


class CpuMoeBackend(TorchMoeBackend):
    ops: CpuOps

    def routed(self, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, experts: Experts) -> Tensor:
        are_few = ids_TK.numel() <= FEW_TOKENS[x_TD.dtype.itemsize] * experts.total
        is_compiled = experts.is_plain or experts.is_squared  # squared experts have no biases
        if not (are_few and is_compiled):
            return super().routed(x_TD, weights_TK, ids_TK, experts)
        return self.ops.experts(
            x_TD, experts.gate_up_LGD, experts.down_LDF, weights_TK, ids_TK, experts.first
        )
