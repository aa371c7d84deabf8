"""Which backend computes a mixture's experts: it follows the ops that the device was given."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minisgl.moe.base import BaseMoeBackend, TorchMoeBackend

if TYPE_CHECKING:
    from minisgl.kernel.ops import Ops


def create_moe_backend(ops: Ops) -> BaseMoeBackend:
    """The fastest for the device of `ops`."""
    if ops.name == "triton":
        from minisgl.moe.fused import FusedMoeBackend  # needs Triton, which a CPU's torch lacks

        return FusedMoeBackend(ops)
    if ops.name == "cpu":
        from minisgl.kernel.cpu import CpuOps
        from minisgl.moe.cpu import CpuMoeBackend

        assert isinstance(ops, CpuOps)
        return CpuMoeBackend(ops)
    return TorchMoeBackend(ops)
