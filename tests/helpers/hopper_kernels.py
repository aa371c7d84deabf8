"""`Kernels` as on an H200, without one: a test says what making one gives."""

from __future__ import annotations

from typing import Any

from minisgl.kernel.hopper import Kernels


def uncompiled(otherwise: str, library: Any = None) -> Kernels[Any]:
    """library: what stands for the calls of the CUDA driver."""
    kernels: Kernels[Any] = Kernels.__new__(Kernels)
    kernels.library, kernels._otherwise = library, otherwise
    kernels._name, kernels._cubin = "product", lambda kind: bytes(kind)
    kernels._made, kernels._weight_maps, kernels._prefer_shared = {}, {}, False
    return kernels
