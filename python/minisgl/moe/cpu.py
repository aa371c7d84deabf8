"""The experts on a CPU: in C++ (`kernel/csrc/moe.cpp`) where an expert gets few tokens."""

from __future__ import annotations

from torch import Tensor

from minisgl.kernel.cpu import CpuOps
from minisgl.moe.base import BaseMoeBackend, Experts, TorchMoeBackend

FEW_TOKENS = {2: 3, 4: 16}
"""Of an expert, on average, by the bytes of a number. On 2 threads the loop takes, of the time of
C++, as torch's products keep tiles of weights and tokens in the caches::

    experts                      at 2      3      6      8     16     24 tokens
    32 of 384 x 1,024, bfloat16  1.48   1.37   0.93   0.80   0.52   0.47
    128 of 768 x 2,048           1.09   0.90   0.69   0.66   0.40   0.36
    32 of 384 x 1,024, float32   2.04   1.82   1.37   1.38   1.16   1.08
    128 of 768 x 2,048           2.59   2.35   1.63   1.48   1.23   1.12
"""


class CpuMoeBackend(BaseMoeBackend):
    def __init__(self, ops: CpuOps) -> None:
        super().__init__(ops)
        self._cpu = ops
        self._many = TorchMoeBackend(ops)

    def routed(self, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, experts: Experts) -> Tensor:
        if ids_TK.numel() > FEW_TOKENS[x_TD.dtype.itemsize] * experts.total:
            return self._many.routed(x_TD, weights_TK, ids_TK, experts)
        return self._cpu.experts(
            x_TD, experts.gate_up_LGD, experts.down_LDF, weights_TK, ids_TK, experts.first
        )
