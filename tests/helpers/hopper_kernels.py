"""`Kernels` without a GPU: a test replaces `make` or the driver."""

from __future__ import annotations

import ctypes
import re
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from minisgl_kernels.hopper import Kernels
from minisgl_zoo.recurrent.delta_rule import DeltaStep


def uncompiled(otherwise: str, library: Any = None) -> Kernels[Any]:
    """library: replaces the calls of the CUDA driver."""
    kernels: Kernels[Any] = Kernels.__new__(Kernels)
    kernels.library, kernels.num_cores, kernels._otherwise = library, 132, otherwise
    kernels._name, kernels._cubin = "gemm", lambda kind: bytes(kind)
    kernels._made, kernels._weight_maps, kernels._prefer_shared = {}, {}, False
    kernels._begun = set()
    return kernels


def structs_of_launches(kernels: Kernels[Any], kind: type[ctypes.Structure]) -> list[Any]:
    """Return a list to which each launch appends a copy of its only argument, a struct."""
    structs: list[Any] = []

    def launch(*numbers: Any) -> None:
        (address,) = (ctypes.c_int64 * 1).from_address(numbers[5])
        structs.append(kind.from_buffer_copy(ctypes.string_at(address, ctypes.sizeof(kind))))

    kernels.library.kernel_launch = launch
    return structs


def delta_step(dtype: torch.dtype, **changes: Any) -> DeltaStep:
    """Return a step of the delta rule with six heads of 128, none of which share a key head."""
    tensors = {
        field.name: torch.zeros(2, 6, 128, 128, dtype=dtype)
        for field in fields(DeltaStep)
        if field.type == "Tensor"
    }
    return DeltaStep(**{**tensors, "skip_N": None, "interval": 64, "page_size": 16, **changes})


def addresses(step: DeltaStep) -> dict[str, int]:
    """Return the address of each tensor by its name without axes."""
    values = {field.name: getattr(step, field.name) for field in fields(step)}
    return {
        re.sub("_[A-Z]+$", "", name): value.data_ptr()
        for name, value in values.items()
        if isinstance(value, Tensor)
    }
