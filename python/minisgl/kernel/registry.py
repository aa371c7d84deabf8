"""The twins of `Ops` by device, and the one place that chooses."""

from __future__ import annotations

import torch

from minisgl.kernel.hopper import on_hopper
from minisgl.kernel.jit import JitUnavailable, begin_building, load_library
from minisgl.kernel.ops import Ops
from minisgl.utils.logger import get_logger

logger = get_logger(__name__)


def create_ops(device: torch.device) -> Ops:
    """The fastest for `device`, of GPUs the current one; called once, where the engine is built."""
    return _create_cuda_ops() if device.type == "cuda" else _create_cpu_ops()


def _create_cpu_ops() -> Ops:
    from minisgl.kernel.cpu import CpuOps

    try:
        return CpuOps(load_library())
    except JitUnavailable as error:
        logger.warning("ops: plain torch, slower (%s)", error)
        return Ops()


def _create_cuda_ops() -> Ops:
    """For the current device."""
    from minisgl.kernel.cuda import CudaOps  # needs Triton, which a CPU's torch lacks
    from minisgl.kernel.thin import ThinProducts

    ops = CudaOps(on_hopper(ThinProducts, "products of few rows are cuBLAS's"))
    begin_building()  # the host's own, for the prefix tree: a first start has more to compile
    return ops
