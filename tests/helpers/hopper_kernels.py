"""`Kernels` without a GPU: a test replaces `make` or the driver."""

from __future__ import annotations

import ctypes
import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minisgl.kernel.hopper import Kernels


def uncompiled(otherwise: str, library: Any = None) -> Kernels[Any]:
    """library: replaces the calls of the CUDA driver."""
    kernels: Kernels[Any] = Kernels.__new__(Kernels)
    kernels.library, kernels.num_cores, kernels._otherwise = library, 132, otherwise
    kernels._name, kernels._cubin = "gemm", lambda kind: bytes(kind)
    kernels._made, kernels._weight_maps, kernels._prefer_shared = {}, {}, False
    return kernels


def structs_of_launches(kernels: Kernels[Any], kind: type[ctypes.Structure]) -> list[Any]:
    """Return a list to which each launch appends a copy of its only argument, a struct."""
    structs: list[Any] = []

    def launch(*numbers: Any) -> None:
        (address,) = (ctypes.c_int64 * 1).from_address(numbers[5])
        structs.append(kind.from_buffer_copy(ctypes.string_at(address, ctypes.sizeof(kind))))

    kernels.library.kernel_launch = launch
    return structs


def tensor_arguments(function: Callable[..., Any], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return a tensor [2, 6, 128, 128] for each argument that is one."""
    return {
        name: torch.zeros(2, 6, 128, 128, dtype=dtype)
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.annotation == "Tensor"
    }


def assert_fields(struct: Any, tensors: dict[str, Tensor]) -> None:
    """The struct has each tensor's address in the field with its name, which has no axes."""
    for name, tensor in tensors.items():
        assert getattr(struct, re.sub("_[A-Z]+$", "", name)) == tensor.data_ptr(), name
