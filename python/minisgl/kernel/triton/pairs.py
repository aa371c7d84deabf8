"""Pairs of 8-bit keys or values as 16-bit floats, in two to four instructions for two pairs.

With Triton's casts of fp8 to bfloat16 a key and a value of 128 dims take 53 instructions of a warp,
in bfloat16 they take 23, and with these 25 (int8: 57 and 33). A word of 16 bits has the numbers of
two dims. The even dims of two words become a pair of floats, and the odd dims another, as matrix
instructions take them. fp8 becomes float16, by the instruction for it; int8 becomes bfloat16, by
the bits of 128 to 255.
"""

from __future__ import annotations

import triton
import triton.language as tl

from minisgl.kernel.triton.launch import INTERPRET
from minisgl.kernel.triton.quantised import FP8, PLAIN

WEIGHT = tl.constexpr(32768.0)
"""The softmax's weights are multiplied by it before they become float16. Then those down to 2**-39
of the largest are not 0."""

INTERPRETED = tl.constexpr(INTERPRET)


@triton.constexpr_function
def takes_pairs(kv, dtype, head_dim, block):
    """Return whether keys and values of 8 bits are read as pairs. int8 requires queries in
    bfloat16."""
    is_16_bit = dtype in (tl.bfloat16, tl.float16) if kv == FP8.value else dtype == tl.bfloat16
    return kv != PLAIN.value and is_16_bit and head_dim % 2 == 0 and block > 16


@triton.jit
def as_float16(q, scale):
    """Return q as float16, and its scale [M, 1].

    Each row is multiplied by a power of two that brings its largest magnitude to 2**14 or above,
    and its scale is divided by it. Numbers of at least 2**-28 of the row's largest stay exact.
    """
    q = q.to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(q), 1), 1e-30)
    exponent = largest.to(tl.int32, bitcast=True) & 0x7F800000
    factor = (0x7F000000 - exponent + (14 << 23)).to(tl.float32, bitcast=True)
    inverse = (exponent - (14 << 23)).to(tl.float32, bitcast=True)
    return (q * factor[:, None]).to(tl.float16), (scale * inverse)[:, None]


@triton.jit
def split_pairs(x):
    """Return the even and the odd columns of [M, H]."""
    return tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))


@triton.jit
def join_pairs(x, y):
    """Undo `split_pairs`."""
    return tl.reshape(tl.join(x, y), [x.shape[0], x.shape[1] * 2])


_FROM_FP8 = """{
.reg .b32 bytes;
.reg .b16 low, high;
prmt.b32 bytes, $1, 0, SELECTED;
mov.b32 {low, high}, bytes;
cvt.rn.f16x2.e4m3x2 $0, low;
}"""
_FROM_INT8 = """{
.reg .b32 own, low, sign, minus;
mov.b32 minus, 0xbf80bf80;
shr.u32 own, $1, SHIFT;
lop3.b32 low, own, 0x007f007f, 0x43004300, 0xea;
lop3.b32 sign, own, 0x00800080, 0x43004300, 0xea;
fma.rn.bf16x2 $0, sign, minus, low;
}"""
# Made here, because Triton lets no function that a kernel calls use methods of strings.
EVEN_FP8, ODD_FP8 = (tl.constexpr(_FROM_FP8.replace("SELECTED", x)) for x in ("0x0020", "0x0031"))
EVEN_INT8, ODD_INT8 = (tl.constexpr(_FROM_INT8.replace("SHIFT", x)) for x in ("0", "8"))


@triton.jit
def unpacked(words, KV: tl.constexpr, ODD: tl.constexpr):
    """Return the numbers of the even dims, which are the low bytes of words; with ODD those of the
    odd dims, the high bytes. FP8 as float16, INT8 as bfloat16."""
    if INTERPRETED:
        byte = (words >> (8 if ODD else 0)) & 0xFF
        x = byte.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    elif KV == FP8:
        x = tl.inline_asm_elementwise(
            ODD_FP8 if ODD else EVEN_FP8, "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        x = tl.inline_asm_elementwise(
            ODD_INT8 if ODD else EVEN_INT8, "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    return x
