"""Gated activations (GLU variants, Shazeer 2020): `[..., 2F]`, gate then up, to `[..., F]`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from torch import Tensor

if TYPE_CHECKING:
    from minisgl.kernel.ops import Ops

Activation = Literal["silu", "gelu_tanh"]


def get_activation(name: Activation, ops: Ops) -> Callable[[Tensor], Tensor]:
    """`silu_and_mul` or `gelu_and_mul` (GELU in its tanh form) of `ops`."""
    return ops.silu_and_mul if name == "silu" else ops.gelu_and_mul
