"""Creates the ops of a device: those of table `ops` (`minisgl.plugins`), or the core's."""

from __future__ import annotations

import torch

from minisgl import plugins
from minisgl.kernel.cpu import CpuOps
from minisgl.kernel.jit import begin_building, load_library
from minisgl.kernel.once import JitUnavailable
from minisgl.kernel.ops import Ops
from minisgl.utils.logger import get_logger

logger = get_logger(__name__)


def create_ops(device: torch.device) -> Ops:
    """Return the fastest ops for `device`, which must be the current GPU if it is one. The engine
    calls this once."""
    return _create_cuda_ops() if device.type == "cuda" else _create_cpu_ops()


def _create_cpu_ops() -> Ops:
    try:
        library = load_library()
    except JitUnavailable as error:
        logger.warning("ops: plain torch, slower (%s)", error)
        return Ops()
    create = plugins.find("ops", "cpu") or CpuOps
    ops: Ops = create(library)
    return ops


def _create_cuda_ops() -> Ops:
    """Return the ops of the current device."""
    from minisgl.kernel.cuda import CudaOps  # imports Triton, which CPU builds of torch lack

    create = plugins.find("ops", "cuda") or CudaOps
    ops: Ops = create()
    begin_building()  # the C++ for the prefix tree, in parallel to the rest of the start
    return ops
