"""Creates the backend of a mixture's experts, by the device's ops and the weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from minisgl.moe.base import BaseMoeBackend, TorchMoeBackend
from minisgl.quantization import PlainWeight, Weight

if TYPE_CHECKING:
    from minisgl.kernel.ops import Ops


def create_moe_backend(
    ops: Ops, dtype: torch.dtype, weight: type[Weight] = PlainWeight
) -> BaseMoeBackend:
    """Return the fastest backend for `ops` and for experts of this kind of weight.

    dtype: of the activations; the backend computes others, too.
    """
    if not issubclass(weight, PlainWeight):  # other kernels read plain tensors
        if ops.name == "triton":
            from minisgl.moe.packed import PackedMoeBackend

            return PackedMoeBackend(ops)
        return TorchMoeBackend(ops)
    if ops.name == "triton":
        from functools import partial

        from minisgl.kernel.grouped import GroupedGemms
        from minisgl.kernel.hopper import on_hopper
        from minisgl.moe.fused import FusedMoeBackend  # needs Triton, which a CPU's torch lacks

        otherwise = "experts' GEMMs of many rows are Triton's"
        return FusedMoeBackend(ops, on_hopper(partial(GroupedGemms, dtype), otherwise))
    if ops.name == "cpu":
        from minisgl.kernel.cpu import CpuOps
        from minisgl.moe.cpu import CpuMoeBackend

        assert isinstance(ops, CpuOps)
        return CpuMoeBackend(ops)
    return TorchMoeBackend(ops)
