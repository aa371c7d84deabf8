"""GEMVs by packed weights: one row, whose time is that of reading the weights.

As in `minisgl_kernels.triton.gemv`, a program loads all weights of some outputs into registers
before it waits for the kernel that makes its input, and computes the norm before and the activation
after. The sum of a chunk, which is 16 bytes or a group of weights, is multiplied by the chunk's
scale. The sum of (number - zero) * x is computed as the sum of number * x, minus zero times the
sum of x.

Axes: D inputs, F outputs, C chunks of V inputs, K experts of a token, L those of this rank.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.ops import Activation
from minisgl.kernel.triton.elementwise import activate
from minisgl.kernel.triton.launch import Launcher, begin, power_of_2
from minisgl_kernels.triton.packed import as_float, constants_of, nibbles
from minisgl_zoo.weights.quantised import Packed

MAX_INPUTS = 32768
TILE_BYTES, MIN_ROWS, MIN_BYTES = 32 << 10, 2, 48 << 10
"""The most weights that one program holds; but it holds at least two rows if these have no more
than MIN_BYTES. On an H200 gate and up of 14B in fp8 take 55 us with 32 KB and 66 with 48, a down
projection 31 with one row and 26 with two."""


def chunk(weight: Packed) -> int:
    """Return the inputs of a chunk."""
    return min(32, weight.group or 32) if weight.is_4_bit else 16


def norm_linear(
    x_MD: Tensor,
    residual_MD: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    weight: Packed,
    bias: Tensor | None,
    gate: Activation | None,
) -> tuple[Tensor, Tensor]:
    """See `Ops.norm_linear`. One row, at most MAX_INPUTS inputs, a multiple of `chunk`."""
    halves, size = 2 if gate else 1, chunk(weight)
    outputs, inputs = weight.shape[-2] // halves, weight.shape[-1]
    out_MF = torch.empty((1, outputs), dtype=x_MD.dtype, device=x_MD.device)
    total_MD = x_MD if residual_MD is None else torch.empty_like(x_MD)
    # A tile's width is a power of two.
    chunks = inputs // size
    width = power_of_2(chunks + 1) // 2
    rest = power_of_2(chunks - width) if chunks > width else 0
    row_bytes = (width + rest) * (size // 2 if weight.is_4_bit else size) * halves
    block = max(power_of_2(TILE_BYTES // row_bytes + 1) // 2, 1)
    if block * halves < MIN_ROWS and MIN_ROWS * row_bytes <= MIN_BYTES:
        block = MIN_ROWS
    block = min(block, power_of_2(max(outputs // 256, 1)))
    _launch_row(
        (-(-outputs // block), 1, 1),
        (
            x_MD, x_MD if residual_MD is None else residual_MD,
            x_MD if norm_weight is None else norm_weight,
            *weight.tensors, x_MD if bias is None else bias, out_MF, total_MD, eps,
        ),
        (
            outputs, inputs, size, width, rest, block, residual_MD is not None,
            norm_weight is not None, bias is not None, bool(gate), gate == "silu",
            *constants_of(weight),
        ),
        dtype=(x_MD.dtype, None if norm_weight is None else norm_weight.dtype, *weight.key),
        num_warps=4 if inputs <= 20480 else 8,
    )  # fmt: skip
    return out_MF, total_MD


def experts_of_few(
    x_TD: Tensor,
    gate_up: Packed,
    down: Packed,
    weights_TK: Tensor,
    ids_TK: Tensor,
    first: int,
    *,
    blocks: tuple[int, int] = (4, 8),
) -> Tensor:
    """See `minisgl_kernels.triton.moe_few.experts_of_few`."""
    (num_tokens, hidden), top_k = x_TD.shape, ids_TK.shape[1]
    num_held, inner = len(down.numbers), down.shape[-1]
    act = torch.empty((num_tokens * top_k, inner), dtype=x_TD.dtype, device=x_TD.device)
    out_TD = torch.empty_like(x_TD)
    up_size, down_size = chunk(gate_up), chunk(down)
    constants = (num_held, first, top_k, hidden, inner)
    _launch_up(
        (-(-inner // blocks[0]), num_tokens * top_k, 1), (x_TD, *gate_up.tensors, ids_TK, act),
        (*constants, blocks[0], up_size, _step(hidden // up_size, 64), *constants_of(gate_up)),
        dtype=(x_TD.dtype, *gate_up.key), num_warps=4,
    )  # fmt: skip
    _launch_down(
        (-(-hidden // blocks[1]), num_tokens, 1),
        (act, *down.tensors, ids_TK, weights_TK, out_TD),
        (*constants, blocks[1], down_size, _step(inner // down_size, 32), *constants_of(down)),
        dtype=(x_TD.dtype, *down.key), num_warps=4,
    )  # fmt: skip
    return out_TD


def _step(count: int, most: int) -> int:
    """Return the chunks of an iteration: a power of two, at most `most`. It divides `count` if that
    allows 16 or more."""
    step = min(count & -count, most)
    return step if step >= 16 else min(power_of_2(count), most)


@triton.jit
def _fetch(
    numbers_ptr, scale_ptr, zero_ptr, row, inside, first, D: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    MIDDLE: tl.constexpr, EXPONENT: tl.constexpr,
):  # fmt: skip
    """Return (numbers, scales [B, C], zeros [B, C]) of C chunks of `row` [B] (int64), from `first`
    on.

    Numbers are [B, C, V]; those of 4 bits are words [B, C, V / 8]. Scales are 1 if there are
    none.
    """
    GROUPS: tl.constexpr = (D + GROUP - 1) // GROUP if GROUP > 0 else 1
    WORDS: tl.constexpr = V // 8 if KIND >= 3 else V
    c = first + tl.arange(0, C)
    there = inside[:, None] & (c[None, :] < D // V)
    at = row[:, None] * (D // V) + c[None, :]
    at = at[:, :, None] * WORDS + tl.arange(0, WORDS)[None, None, :]
    numbers = tl.load(numbers_ptr + at, mask=there[:, :, None], other=0.0 if KIND == 0 else 0)
    group = (c * V // GROUP if GROUP > 0 else c * 0)[None, :]
    if GROUP > 0:
        at = (row // ROWS * GROUPS)[:, None] + group
        scale = as_float(tl.load(scale_ptr + at, mask=there, other=0.0), EXPONENT)
    else:
        scale = tl.where(there, 1.0, 0.0)
    if MIDDLE == -1:
        at = row[:, None] * GROUPS + group
        zero = tl.load(zero_ptr + at, mask=there, other=0).to(tl.float32)
    else:
        zero = tl.full(scale.shape, MIDDLE, tl.float32)
    return numbers, scale, zero


@triton.jit
def _sums(numbers, scale, zero, x, KIND: tl.constexpr, MIDDLE: tl.constexpr):
    """Return the rows that `_fetch` returned times x [C, V]: [B], in float32."""
    x = x.to(tl.float32)
    factor = x
    if KIND < 3:
        values = numbers.to(tl.float32)
    else:
        values = tl.reshape(nibbles(numbers, KIND), (numbers.shape[0], x.shape[0], x.shape[1]))
        if KIND == 3:
            zero += 128.0
        else:
            # The product of a subnormal number with 2**100 * x is not subnormal.
            factor = x * 1.2676506002282294e30
            scale *= 67108864.0
    sums = tl.sum(values * factor[None, :, :], 2)
    if (KIND == 3) | (MIDDLE != 0):
        sums -= zero * tl.sum(x, 1)[None, :]
    return tl.sum(sums * scale, 1)


@triton.jit
def _row(
    x_ptr, residual_ptr, norm_ptr, numbers_ptr, scale_ptr, zero_ptr, outer_ptr, bias_ptr, out_ptr,
    total_ptr, eps,
    F: tl.constexpr, D: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr,
    BLOCK: tl.constexpr, ADD: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr,
    GATED: tl.constexpr, SILU: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, MIDDLE: tl.constexpr, EXPONENT: tl.constexpr, OUTER: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    f = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = f.to(tl.int64)
    in_f = f < F
    # a: chunks [0, WIDTH). b: chunks [WIDTH, D / V), if there are any.
    v = tl.arange(0, V)[None, :]
    a = tl.arange(0, WIDTH)[:, None] * V + v
    b = (WIDTH + tl.arange(0, max(REST, 1)))[:, None] * V + v
    in_b = b < D
    n_a, s_a, z_a = _fetch(
        numbers_ptr, scale_ptr, zero_ptr, row, in_f, 0, D, V, WIDTH, KIND, GROUP, ROWS, MIDDLE,
        EXPONENT,
    )  # fmt: skip
    if REST:
        n_b, s_b, z_b = _fetch(
            numbers_ptr, scale_ptr, zero_ptr, row, in_f, WIDTH, D, V, REST, KIND, GROUP, ROWS,
            MIDDLE, EXPONENT,
        )  # fmt: skip
    if GATED:
        n_ua, s_ua, z_ua = _fetch(
            numbers_ptr, scale_ptr, zero_ptr, row + F, in_f, 0, D, V, WIDTH, KIND, GROUP, ROWS,
            MIDDLE, EXPONENT,
        )  # fmt: skip
        if REST:
            n_ub, s_ub, z_ub = _fetch(
                numbers_ptr, scale_ptr, zero_ptr, row + F, in_f, WIDTH, D, V, REST, KIND, GROUP,
                ROWS, MIDDLE, EXPONENT,
            )  # fmt: skip
    if NORM:
        norm_a = tl.load(norm_ptr + a)
        if REST:
            norm_b = tl.load(norm_ptr + b, mask=in_b, other=0.0)
    begin(PDL)
    x_a = tl.load(x_ptr + a)
    if REST:
        x_b = tl.load(x_ptr + b, mask=in_b, other=0.0)
    if ADD:
        x_a = x_a + tl.load(residual_ptr + a)
        if REST:
            x_b = x_b + tl.load(residual_ptr + b, mask=in_b, other=0.0)
        if tl.program_id(0) == 0:
            tl.store(total_ptr + a, x_a)
            if REST:
                tl.store(total_ptr + b, x_b, mask=in_b)
    if NORM:
        square = tl.sum(tl.sum(x_a.to(tl.float32) * x_a.to(tl.float32), 1), 0)
        if REST:
            square += tl.sum(tl.sum(x_b.to(tl.float32) * x_b.to(tl.float32), 1), 0)
        scale = tl.rsqrt(square / D + eps)
        x_a = (x_a.to(tl.float32) * scale * norm_a.to(tl.float32)).to(x_a.dtype)
        if REST:
            x_b = (x_b.to(tl.float32) * scale * norm_b.to(tl.float32)).to(x_b.dtype)
    y = _sums(n_a, s_a, z_a, x_a, KIND, MIDDLE)
    if REST:
        y += _sums(n_b, s_b, z_b, x_b, KIND, MIDDLE)
    if OUTER:
        y *= tl.load(outer_ptr + f, mask=in_f, other=0.0)
    if BIAS:
        y += tl.load(bias_ptr + f, mask=in_f, other=0.0).to(tl.float32)
    y = y.to(x_a.dtype)
    if GATED:
        up = _sums(n_ua, s_ua, z_ua, x_a, KIND, MIDDLE)
        if REST:
            up += _sums(n_ub, s_ub, z_ub, x_b, KIND, MIDDLE)
        if OUTER:
            up *= tl.load(outer_ptr + F + f, mask=in_f, other=0.0)
        if BIAS:
            up += tl.load(bias_ptr + F + f, mask=in_f, other=0.0).to(tl.float32)
        y = activate(y, SILU) * up.to(x_a.dtype)
    tl.store(out_ptr + f, y, mask=in_f)


@triton.jit
def _one(
    x_ptr, numbers_ptr, scale_ptr, zero_ptr, row, inside, D: tl.constexpr, V: tl.constexpr,
    STEP: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, MIDDLE: tl.constexpr, EXPONENT: tl.constexpr,
):  # fmt: skip
    """Return the weights of `row` [BLOCK] times x [D], in float32, without outer scales."""
    total = tl.zeros([BLOCK], tl.float32)
    for first in tl.static_range(0, D // V, STEP):
        d = (first + tl.arange(0, STEP))[:, None] * V + tl.arange(0, V)[None, :]
        numbers, scale, zero = _fetch(
            numbers_ptr, scale_ptr, zero_ptr, row, inside, first, D, V, STEP, KIND, GROUP, ROWS,
            MIDDLE, EXPONENT,
        )  # fmt: skip
        x = tl.load(x_ptr + d, mask=d < D, other=0.0)
        total += _sums(numbers, scale, zero, x, KIND, MIDDLE)
    return total


@triton.jit
def _up(
    x_ptr, numbers_ptr, scale_ptr, zero_ptr, outer_ptr, ids_ptr, act_ptr,
    L: tl.constexpr, FIRST: tl.constexpr, K: tl.constexpr, D: tl.constexpr, F: tl.constexpr,
    BLOCK: tl.constexpr, V: tl.constexpr, STEP: tl.constexpr, KIND: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, MIDDLE: tl.constexpr, EXPONENT: tl.constexpr,
    OUTER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    f = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    pair = tl.program_id(1)
    begin(PDL)
    expert = tl.load(ids_ptr + pair) - FIRST
    if (expert < 0) | (expert >= L):
        return
    row = expert.to(tl.int64) * 2 * F + f
    x = x_ptr + (pair // K) * D
    gate = _one(
        x, numbers_ptr, scale_ptr, zero_ptr, row, f < F, D, V, STEP, BLOCK, KIND, GROUP, ROWS,
        MIDDLE, EXPONENT,
    )  # fmt: skip
    up = _one(
        x, numbers_ptr, scale_ptr, zero_ptr, row + F, f < F, D, V, STEP, BLOCK, KIND, GROUP, ROWS,
        MIDDLE, EXPONENT,
    )  # fmt: skip
    if OUTER:
        gate *= tl.load(outer_ptr + row, mask=f < F, other=0.0)
        up *= tl.load(outer_ptr + row + F, mask=f < F, other=0.0)
    type: tl.constexpr = act_ptr.dtype.element_ty
    act = activate(gate.to(type), True) * up.to(type)
    tl.store(act_ptr + pair.to(tl.int64) * F + f, act, mask=f < F)


@triton.jit
def _down(
    act_ptr, numbers_ptr, scale_ptr, zero_ptr, outer_ptr, ids_ptr, share_ptr, out_ptr,
    L: tl.constexpr, FIRST: tl.constexpr, K: tl.constexpr, D: tl.constexpr, F: tl.constexpr,
    BLOCK: tl.constexpr, V: tl.constexpr, STEP: tl.constexpr, KIND: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, MIDDLE: tl.constexpr, EXPONENT: tl.constexpr,
    OUTER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    t = tl.program_id(1)
    total = tl.zeros([BLOCK], tl.float32)
    begin(PDL)
    for i in range(K):
        expert = tl.load(ids_ptr + t * K + i) - FIRST
        if (expert >= 0) & (expert < L):
            row = expert.to(tl.int64) * D + d
            y = _one(
                act_ptr + (t * K + i) * F, numbers_ptr, scale_ptr, zero_ptr, row, d < D, F, V, STEP,
                BLOCK, KIND, GROUP, ROWS, MIDDLE, EXPONENT,
            )  # fmt: skip
            if OUTER:
                y *= tl.load(outer_ptr + row, mask=d < D, other=0.0)
            total += y * tl.load(share_ptr + t * K + i)
    tl.store(out_ptr + t * D + d, total.to(out_ptr.dtype.element_ty), mask=d < D)


_launch_row = Launcher(_row)
_launch_up = Launcher(_up)
_launch_down = Launcher(_down)
