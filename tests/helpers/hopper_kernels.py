"""`Kernels` without a GPU: a test replaces `make` or the driver."""

from __future__ import annotations

from typing import Any

from minisgl.kernel.hopper import Kernels


def uncompiled(otherwise: str, library: Any = None) -> Kernels[Any]:
    """library: replaces the calls of the CUDA driver."""
    kernels: Kernels[Any] = Kernels.__new__(Kernels)
    kernels.library, kernels.num_cores, kernels._otherwise = library, 132, otherwise
    kernels._name, kernels._cubin = "gemm", lambda kind: bytes(kind)
    kernels._made, kernels._weight_maps, kernels._prefer_shared = {}, {}, False
    return kernels
