"""Creates the backend of a mixture's experts, by the device's ops and the weights: that of table
`moe` (`minisgl.plugins`), or the core's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from minisgl import plugins
from minisgl.kernel.cpu import CpuOps
from minisgl.moe.base import BaseMoeBackend, CpuMoeBackend, TorchMoeBackend
from minisgl.quantization import PlainWeight, Weight

if TYPE_CHECKING:
    from minisgl.kernel.ops import Ops


def create_moe_backend(
    ops: Ops, dtype: torch.dtype, weight: type[Weight] = PlainWeight
) -> BaseMoeBackend:
    """Return the fastest backend for `ops` and for experts of this kind of weight.

    dtype: the dtype of the activations for which the backend is chosen; it also computes others.
    """
    is_plain, is_cpu = issubclass(weight, PlainWeight), isinstance(ops, CpuOps)
    name = "plain" if is_plain else "panels" if is_cpu else weight.moe_backend
    if create := plugins.find("moe", name, ops=ops.name):
        backend: BaseMoeBackend = create(ops, dtype)
        return backend
    if is_plain and ops.name == "triton":
        from minisgl.moe.fused import FusedMoeBackend  # imports Triton, which CPU builds lack

        return FusedMoeBackend(ops)
    return CpuMoeBackend(ops) if is_plain and is_cpu else TorchMoeBackend(ops)
