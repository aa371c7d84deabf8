"""Keys and values in 8 bits, for the kernels that write and read them
(`minisgl_zoo.kv8.pool`).

FP8 has a scale for each head, [K]. INT8 has one for each slot and head, [slots, K]; it is written
together with the numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from minisgl.kvcache.pool import LayerPool

# The kinds of pools. PLAIN has numbers of the activations' dtype, the others also have scales.
PLAIN = tl.constexpr(0)
FP8 = tl.constexpr(1)
INT8 = tl.constexpr(2)

ROUND = tl.constexpr(12582912.0)
"""1.5 * 2**23: adding it to a small float32 rounds to an integer, ties to even."""


def kind_of(pool: LayerPool) -> int:
    """Return PLAIN, FP8 or INT8 as the constant of a kernel."""
    kinds = {torch.float8_e4m3fn: FP8, torch.int8: INT8}
    return int(kinds.get(pool.k.dtype, PLAIN).value)


def tensors_of(pool: LayerPool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return keys, values and their scales. For PLAIN the scales are tensors that kernels do not
    read."""
    return (
        pool.k,
        pool.v,
        pool.k if pool.k_scale is None else pool.k_scale,
        pool.v if pool.v_scale is None else pool.v_scale,
    )


@triton.jit
def to_fp8(x, scale):
    """Return x / scale as fp8: the nearest number, ties to even, at most 448; NaN stays NaN.

    Not by a cast, because that of Triton 3.6's interpreter does not carry into the exponent.
    """
    y = tl.div_rn(x.to(tl.float32), scale)
    size = tl.minimum(tl.abs(y), 448.0)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = (size + 16384.0).to(tl.int32, bitcast=True) & 0xF  # an ulp of 2**14 is 2**-9
    rounded = tl.where(size < 0.015625, subnormal, normal)
    rounded = tl.where(y != y, 0x7F, rounded)
    sign = (y.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (rounded | sign).to(tl.uint8).to(tl.float8e4nv, bitcast=True)


@triton.jit
def to_int8(x, scale):
    """Return x / scale as int8: the nearest number, ties to even."""
    return (tl.div_rn(x.to(tl.float32), scale) + ROUND - ROUND).to(tl.int8)


@triton.jit
def scale_of_int8(largest):
    """Return the scales of rows with these largest magnitudes."""
    return tl.where(largest == 0, 1.0, tl.div_rn(largest, tl.full([1], 127.0, tl.float32)))


@triton.jit
def largest_of(x):
    """Return the largest magnitude of each row, [X, Y] -> float32 [X]; NaN if a row has NaN."""
    x32 = tl.abs(x.to(tl.float32))
    return tl.max(x32, 1) + tl.sum(x32 * 0.0, 1)
