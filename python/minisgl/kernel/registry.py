"""Creates the ops of a device."""

from __future__ import annotations

import torch

from minisgl.kernel.library import JitUnavailable, load_cpu_library
from minisgl.kernel.ops import Ops
from minisgl.utils.logger import get_logger

logger = get_logger(__name__)


def create_ops(device: torch.device) -> Ops:
    """Return the fastest ops for `device`, which must be the current GPU if it is one. The engine
    calls this once."""
    return _create_cuda_ops() if device.type == "cuda" else _create_cpu_ops()


def _create_cpu_ops() -> Ops:
    try:
        library = load_cpu_library()
    except JitUnavailable as error:
        logger.warning("ops: plain torch, slower (%s)", error)
        return Ops()
    from minisgl.kernel.cpu import CpuOps

    return CpuOps(library)


def _create_cuda_ops() -> Ops:
    """Return the ops of the current device."""
    from minisgl.kernel.cuda import CudaOps  # imports Triton, which CPU builds of torch lack
    from minisgl.kernel.jit import begin_building
    from minisgl_kernels.hopper import on_hopper
    from minisgl_kernels.packed_skinny import PackedSkinny
    from minisgl_kernels.skinny import SkinnyGemms

    ops = CudaOps(
        on_hopper(SkinnyGemms, "cuBLAS computes skinny GEMMs"),
        on_hopper(PackedSkinny, "Triton computes skinny GEMMs by packed weights"),
    )
    begin_building()  # the C++ for the prefix tree, in parallel to the rest of the start
    return ops
