"""Gated activations (GLU variants, Shazeer 2020): `[..., 2F]`, gate then up, to `[..., F]`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from minisgl.kernel.ops import Ops
    from minisgl.layers.linear import NormLinear

Activation = Literal["silu", "gelu_tanh"]


def get_gate(name: Activation, ops: Ops) -> NormLinear:
    """`norm_linear_silu` or `norm_linear_gelu` (GELU in its tanh form) of `ops`."""
    return ops.norm_linear_silu if name == "silu" else ops.norm_linear_gelu
