"""Which backend computes a mixture's experts: it follows the ops that the device was given."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from minisgl.kernel.hopper import on_hopper
from minisgl.moe.base import BaseMoeBackend, TorchMoeBackend

if TYPE_CHECKING:
    from minisgl.kernel.ops import Ops


def create_moe_backend(ops: Ops, dtype: torch.dtype) -> BaseMoeBackend:
    """The fastest for the device of `ops` and for experts of `dtype`; it computes others, too."""
    if ops.name == "triton":
        from minisgl.kernel.grouped import GroupedProducts
        from minisgl.moe.fused import FusedMoeBackend  # needs Triton, which a CPU's torch lacks

        otherwise = "experts' products of many rows are Triton's"
        return FusedMoeBackend(ops, on_hopper(partial(GroupedProducts, dtype), otherwise))
    if ops.name == "cpu":
        from minisgl.kernel.cpu import CpuOps
        from minisgl.moe.cpu import CpuMoeBackend

        assert isinstance(ops, CpuOps)
        return CpuMoeBackend(ops)
    return TorchMoeBackend(ops)
