"""The experts on a CPU: in C++ (`kernel/csrc/moe.cpp`) where an expert gets few tokens."""

from __future__ import annotations

from torch import Tensor

from minisgl.kernel.cpu import CpuOps
from minisgl.moe.base import BaseMoeBackend, Experts, TorchMoeBackend

FEW_TOKENS = 6
"""Of an expert, on average. 32 experts of 384 x 1,024 in bfloat16, 2 threads: the loop takes 4.6
times as long at one token in all, 1.7 times at 2 an expert, 0.87 at 8 and 0.56 at 16, as torch's
products keep tiles of weights and tokens in the caches (float32: 1.4 at 8, 0.9 at 32)."""


class CpuMoeBackend(BaseMoeBackend):
    def __init__(self, ops: CpuOps) -> None:
        super().__init__(ops)
        self._cpu = ops
        self._many = TorchMoeBackend(ops)

    def routed(self, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, experts: Experts) -> Tensor:
        if ids_TK.numel() > FEW_TOKENS * experts.total:
            return self._many.routed(x_TD, weights_TK, ids_TK, experts)
        return self._cpu.experts(
            x_TD, experts.gate_up_LGD, experts.down_LDF, weights_TK, ids_TK, experts.first
        )
