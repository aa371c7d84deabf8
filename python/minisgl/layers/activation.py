"""Gated activations (GLU variants, Shazeer 2020): `[..., 2F]`, gate then up, to `[..., F]`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from torch import Tensor

if TYPE_CHECKING:
    from minisgl.kernel.ops import Ops

Activation = Literal["silu", "gelu_tanh"]


Gate = Callable[
    [Tensor, Tensor | None, Tensor, float, Tensor, Tensor | None], tuple[Tensor, Tensor]
]


def get_gate(name: Activation, ops: Ops) -> Gate:
    """`norm_linear_silu` or `norm_linear_gelu` (GELU in its tanh form) of `ops`."""
    return ops.norm_linear_silu if name == "silu" else ops.norm_linear_gelu
