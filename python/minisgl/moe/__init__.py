"""A mixture's experts: routed tokens in, the weighted sums of their experts out.

What it is for: `BaseMoeBackend` and its implementations: plain torch (`TorchMoeBackend`, the
specification), C++ (`CpuMoeBackend`) and fused Triton kernels (`FusedMoeBackend`, with the tiles of
`tuned.json`). What it does not know: families, checkpoints, ranks beyond "these experts are mine".
Read next: `minisgl.moe.base`, then `minisgl.kernel.triton.moe`.
"""

from minisgl.moe.base import BaseMoeBackend, ClampedGate, Experts, SquaredRelu, TorchMoeBackend
from minisgl.moe.registry import create_moe_backend

__all__ = [
    "BaseMoeBackend",
    "ClampedGate",
    "Experts",
    "SquaredRelu",
    "TorchMoeBackend",
    "create_moe_backend",
]
