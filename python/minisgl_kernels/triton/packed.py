"""The decoding of a tile of packed weights (`minisgl_zoo.weights.quantised`).

Numbers of 8 bits are read one by one. Numbers of 4 bits are read as words of 32 bits, with the
first column's number in the low bits. Decoded numbers are exact in bfloat16 and in float16, because
integers of up to 8 bits, fp8 (e4m3) and fp4 (e2m1) have at most 8 significant bits. So a kernel
multiplies the numbers by the activations, and then the float32 sum of each group by its scale.

Axes: L matrices of a stack, F outputs, D inputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.triton.launch import Launcher, begin
from minisgl_zoo.weights.quantised import Kind, Packed

KINDS: dict[Kind, int] = {"fp8": 0, "int8": 1, "uint8": 2, "int4": 3, "fp4": 4}
"""The kernels' constant KIND. From 3 on, numbers are in words."""


def constants_of(weight: Packed) -> tuple[int, int, int, int, bool, bool]:
    """Return KIND, GROUP, ROWS, MIDDLE (-1 if the zeros are a tensor), EXPONENT, OUTER."""
    middle = weight.middle if weight.zero is None else -1
    is_exponent = weight.scale is not None and weight.scale.dtype == torch.uint8
    has_outer = weight.outer is not None
    return KINDS[weight.kind], weight.group, weight.rows, middle, is_exponent, has_outer


@triton.jit
def as_float(scale, EXPONENT: tl.constexpr):
    """Return scales as float32. EXPONENT: they are exponents + 127."""
    if EXPONENT:
        return (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return scale.to(tl.float32)


@triton.jit
def nibbles(words, KIND: tl.constexpr):
    """Return the 8 numbers of each word in order, int32 [...] -> float32 [..., 2, 2, 2].

    Their bits are placed in a float32, which adds 128 to integers and multiplies e2m1 by 2**-126.
    `tl.join` keeps a thread's numbers in the thread.
    """
    each = tl.join(words, words >> 16)
    each = tl.join(each, each >> 8)
    each = tl.join(each, each >> 4)
    if KIND == 3:
        bits = (each << 16) & 0xF0000 | 0x43000000
    else:
        bits = (each << 22) & 0x01C00000 | (each << 28) & -0x80000000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def decode(
    numbers_ptr, scale_ptr, zero_ptr, row, inside, first, D: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    MIDDLE: tl.constexpr, EXPONENT: tl.constexpr, type: tl.constexpr,
):  # fmt: skip
    """Return the numbers of `row` [BLOCK_N] (int64), columns from `first` on, minus their zeros:
    [BLOCK_N, BLOCK_K] of `type`, a dtype of 16 bits.

    Numbers of fp4 are multiplied by their scales, since its groups are small; that is exact, too.
    The caller multiplies columns past D by 0.
    """
    GROUPS: tl.constexpr = (D + GROUP - 1) // GROUP if GROUP > 0 else 1
    if KIND < 3:
        k = first + tl.arange(0, BLOCK_K)
        mask = inside[:, None] & (k[None, :] < D)
        at = numbers_ptr + row[:, None] * D + k[None, :]
        numbers = tl.load(at, mask=mask, other=0.0 if KIND == 0 else 0)
    else:
        w = first // 8 + tl.arange(0, BLOCK_K // 8)
        mask = inside[:, None] & (w[None, :] < D // 8)
        words = tl.load(numbers_ptr + row[:, None] * (D // 8) + w[None, :], mask=mask, other=0)
        numbers = tl.reshape(nibbles(words, KIND), (BLOCK_N, BLOCK_K))
    if MIDDLE == -1:
        at = zero_ptr + row * GROUPS + first // GROUP
        zero = tl.load(at, mask=inside, other=0).to(tl.int16)[:, None]
    else:
        zero = tl.full([1, 1], MIDDLE, tl.int16)
    if KIND == 0:
        # Directly from float16 to bfloat16 takes four times as long.
        values = numbers.to(tl.float32).to(type)
    elif KIND < 3:
        values = (numbers.to(tl.int16) - zero).to(type)
    elif KIND == 3:
        values = numbers.to(type) - (zero + 128).to(type)
    else:
        g = first // GROUP + tl.arange(0, BLOCK_K // GROUP)
        mask = inside[:, None] & (g[None, :] < GROUPS)
        at = scale_ptr + row[:, None] * GROUPS + g[None, :]
        scale = as_float(tl.load(at, mask=mask, other=0.0), EXPONENT)
        wide = tl.reshape(numbers, (BLOCK_N, BLOCK_K // GROUP, GROUP))
        wide = wide * 8.507059173023462e37 * scale[:, :, None]  # 2**126
        values = tl.reshape(wide, (BLOCK_N, BLOCK_K)).to(type)
    return values


def dense(weight: Packed, dtype: torch.dtype) -> Tensor:
    """Return the matrix or the stack, dequantised to a dtype of 16 bits."""
    *others, outputs, inputs = weight.shape
    out = torch.empty((*others, outputs, inputs), dtype=dtype, device=weight.numbers.device)
    rows = out.numel() // inputs
    block_k = weight.group if 32 <= weight.group <= 128 else 128
    _launch_dense(
        (-(-rows // 32), -(-inputs // block_k), 1), (*weight.tensors, out),
        (rows, inputs, 32, block_k, *constants_of(weight)), dtype=(dtype, *weight.key), num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _dense(
    numbers_ptr, scale_ptr, zero_ptr, outer_ptr, out_ptr,
    F: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, MIDDLE: tl.constexpr,
    EXPONENT: tl.constexpr, OUTER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    GROUPS: tl.constexpr = (D + GROUP - 1) // GROUP if GROUP > 0 else 1
    type: tl.constexpr = out_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = row < F
    first = tl.program_id(1) * BLOCK_K
    value = decode(
        numbers_ptr, scale_ptr, zero_ptr, row, inside, first, D, BLOCK_N, BLOCK_K, KIND, GROUP,
        ROWS, MIDDLE, EXPONENT, type,
    ).to(tl.float32)  # fmt: skip
    if (GROUP > 0) & (KIND != 4):
        at = row // ROWS * GROUPS + first // GROUP
        value *= as_float(tl.load(scale_ptr + at, mask=inside, other=0.0), EXPONENT)[:, None]
    if OUTER:
        value *= tl.load(outer_ptr + row, mask=inside, other=0.0)[:, None]
    begin(PDL)
    k = first + tl.arange(0, BLOCK_K)
    at = row[:, None] * D + k[None, :]
    tl.store(out_ptr + at, value.to(type), mask=inside[:, None] & (k[None, :] < D))


_launch_dense = Launcher(_dense)
