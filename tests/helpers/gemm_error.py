"""The bound of a 16-bit GEMM's difference from float64: rounding, and float32 sums."""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDOFF = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
TINY = {torch.bfloat16: 0.0, torch.float16: 2**-25}  # the error of rounding a subnormal number
SUM_ERROR = 2**-18
"""Relative to the sum of magnitudes: float32 sums, of which a matrix instruction cuts bits."""


def exact_gemm(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return x weight^T + bias in float64, and the error allowed before it is rounded."""
    want, magnitude = x.double() @ weight.double().T, x.abs().double() @ weight.abs().double().T
    if bias is not None:
        want += bias.double()
    return want, SUM_ERROR * magnitude


def gated(want: Tensor, error: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the same for silu(gate) * up of a gate half and an up half, each step rounded."""
    error = error + rounding(want, dtype)
    (gate, up), (gate_error, up_error) = want.chunk(2, -1), error.chunk(2, -1)
    active = torch.nn.functional.silu(gate)
    # silu's slope is at most 1.1; its result is rounded, and so is the product.
    active_error = 1.1 * gate_error + rounding(active.abs() + 1.1 * gate_error, dtype)
    want = active * up
    error = active_error * (up.abs() + up_error) + active.abs() * up_error
    return want, error


def rounding(value: Tensor, dtype: torch.dtype) -> Tensor:
    return ROUNDOFF[dtype] * value.abs() + TINY[dtype]
