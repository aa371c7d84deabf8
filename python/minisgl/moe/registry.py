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

    dtype: the dtype of the activations for which the backend is chosen; it also computes others.
    """
    if not issubclass(weight, PlainWeight):
        if ops.name == "triton":
            from minisgl_kernels.fp8_grouped import Fp8Grouped
            from minisgl_kernels.hopper import on_hopper
            from minisgl_kernels.packed_grouped import PackedGrouped
            from minisgl_kernels.packed_moe import PackedMoeBackend

            otherwise = "Triton computes the experts' GEMMs by packed weights"
            return PackedMoeBackend(
                ops, on_hopper(Fp8Grouped, otherwise), on_hopper(PackedGrouped, otherwise)
            )
        return TorchMoeBackend(ops)
    if ops.name == "triton":
        from functools import partial

        from minisgl.moe.fused import FusedMoeBackend  # imports Triton, which CPU builds lack
        from minisgl_kernels.grouped import GroupedGemms
        from minisgl_kernels.hopper import on_hopper

        otherwise = "Triton computes the experts' GEMMs of many rows"
        return FusedMoeBackend(ops, on_hopper(partial(GroupedGemms, dtype), otherwise))
    if ops.name == "cpu":
        from minisgl.kernel.cpu import CpuOps
        from minisgl.moe.cpu import CpuMoeBackend

        assert isinstance(ops, CpuOps)
        return CpuMoeBackend(ops)
    return TorchMoeBackend(ops)
