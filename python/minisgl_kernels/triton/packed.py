"""Weights of 4 or 8 bits in the layout that our kernels read, and the decoding of a tile.

Numbers of 8 bits are read one by one. Numbers of 4 bits are read as words of 32 bits, with the
first column's number in the low bits. Decoded numbers are exact in bfloat16 and in float16, because
integers of up to 8 bits, fp8 (e4m3) and fp4 (e2m1) have at most 8 significant bits. So a kernel
multiplies the numbers by the activations, and then the float32 sum of each group by its scale.

Axes: L matrices of a stack, F outputs, D inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.triton.launch import Launcher, begin

Kind = Literal["fp8", "int8", "uint8", "int4", "fp4"]

KINDS: dict[Kind, int] = {"fp8": 0, "int8": 1, "uint8": 2, "int4": 3, "fp4": 4}
"""The kernels' constant KIND. From 3 on, numbers are in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A matrix [F, D] or a stack [L, F, D]: value = (number - zero) * scale * outer.

    numbers: [..., F, D] of 8 bits, or words int32 [..., F, D / 8]. group: the inputs with one
    scale, a power of 2; 0 if there are only outer scales. rows: the outputs with one scale. scale:
    [..., F / rows, D / group], float32, bfloat16, float16 or fp8; or uint8, which is an exponent +
    127. zero: uint8 [..., F, D / group]; None if all zeros are `middle`. outer: float32 [..., F] or
    None.
    """

    kind: Kind
    numbers: Tensor
    group: int = 0
    rows: int = 1
    scale: Tensor | None = None
    zero: Tensor | None = None
    middle: int = 0
    outer: Tensor | None = None

    @property
    def is_4_bit(self) -> bool:
        return self.kind in ("int4", "fp4")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the decoded numbers, [..., F, D]."""
        *others, columns = self.numbers.shape
        return (*others, columns * (8 if self.is_4_bit else 1))

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """numbers, scale, zero and outer. The numbers take the place of those that are None."""
        others = (self.scale, self.zero, self.outer)
        scale, zero, outer = (self.numbers if x is None else x for x in others)
        return self.numbers, scale, zero, outer

    @property
    def constants(self) -> tuple[int, int, int, int, bool, bool]:
        """KIND, GROUP, ROWS, MIDDLE (-1 if the zeros are a tensor), EXPONENT, OUTER."""
        middle = self.middle if self.zero is None else -1
        is_exponent = self.scale is not None and self.scale.dtype == torch.uint8
        has_outer = self.outer is not None
        return KINDS[self.kind], self.group, self.rows, middle, is_exponent, has_outer

    @property
    def key(self) -> tuple[torch.dtype, torch.dtype]:
        """The dtypes of the numbers and the scales. Each pair has its own compiled kernels."""
        return self.numbers.dtype, self.tensors[1].dtype


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
        (rows, inputs, 32, block_k, *weight.constants), dtype=(dtype, *weight.key), num_warps=4,
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
