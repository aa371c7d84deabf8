"""Which backend computes a mixture's experts: it follows the ops that the device was given."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from minisgl.kernel.jit import JitUnavailable
from minisgl.moe.base import BaseMoeBackend, TorchMoeBackend
from minisgl.utils.logger import get_logger

if TYPE_CHECKING:
    from minisgl.kernel.grouped import GroupedProducts
    from minisgl.kernel.ops import Ops

logger = get_logger(__name__)


def create_moe_backend(ops: Ops) -> BaseMoeBackend:
    """The fastest for the device of `ops`."""
    if ops.name == "triton":
        from minisgl.moe.fused import FusedMoeBackend  # needs Triton, which a CPU's torch lacks

        return FusedMoeBackend(ops, _grouped_products())
    if ops.name == "cpu":
        from minisgl.kernel.cpu import CpuOps
        from minisgl.moe.cpu import CpuMoeBackend

        assert isinstance(ops, CpuOps)
        return CpuMoeBackend(ops)
    return TorchMoeBackend(ops)


def _grouped_products() -> GroupedProducts | None:
    """Of the current device, if that is Hopper and something compiles."""
    from minisgl.kernel.grouped import GroupedProducts

    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return None
    try:
        return GroupedProducts()
    except (JitUnavailable, RuntimeError) as error:
        logger.info("experts' products of many rows are Triton's: %s", error)
        return None
