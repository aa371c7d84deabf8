"""The parts of a prompt's delta rule, or Mamba2, that need no state (decision 0024).

A program of `_delta_prepare` has one interval of a row and one value head, and all run in parallel.
It computes the inverse of the interval's triangular system, which Mamba2 does not have, and the
scores of its queries, decays and norms. It also stores keys and decays of the tokens after the
row's last whole interval.

Axes: as in `minisgl_kernels.triton.delta_extend`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from minisgl.kernel.triton.launch import Launcher, begin

SOLVED = 2
"""Rows of the blocks on a system's diagonal, which are inverted in parallel, row by row. Matrix
products double them: ten products, one after another, instead of 63 rows."""


@triton.jit
def interval_keys(
    mixed, keys_ptr, row_pages, start, end, base, key_head, j, h,
    K: tl.constexpr, H: tl.constexpr, D: tl.constexpr, Z: tl.constexpr, HAS_OLD: tl.constexpr,
):  # fmt: skip
    """Return the interval's keys [C, H]; zeros where it has no token. mixed: the address of its
    first token's row."""
    at = base + j
    in_h = h[None, :] < H
    is_new = (at >= start) & (at < end)
    x = tl.load(mixed + j[:, None] * D + (K + key_head) * H + h[None, :],
                mask=is_new[:, None] & in_h, other=0.0)  # fmt: skip
    if HAS_OLD:
        page = tl.load(row_pages + at // Z, mask=at < start, other=0).to(tl.int64)
        x += tl.load(keys_ptr + ((page * Z + at % Z)[:, None] * K + key_head) * H + h[None, :],
                     mask=(at < start)[:, None] & in_h, other=0.0)  # fmt: skip
    return x


@triton.jit
def interval_queries(
    mixed, start, end, base, key_head, j, h, H: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Return the queries [C, H] of the interval's new tokens; zeros elsewhere."""
    is_new = (base + j >= start) & (base + j < end)
    return tl.load(mixed + j[:, None] * D + key_head * H + h[None, :],
                   mask=is_new[:, None] & (h[None, :] < H), other=0.0)  # fmt: skip


@triton.jit
def _norm_factor(x):
    x = x.to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, 1) + 1e-6)


@triton.jit
def _decays(
    g_ptr, decays_ptr, row_pages, start, end, base, token, n, j, N: tl.constexpr, Z: tl.constexpr,
):  # fmt: skip
    """Return the sums of the interval's log decays [C]. token: the index of its first token."""
    at = base + j
    g = tl.load(g_ptr + (token + j) * N + n, mask=(at >= start) & (at < end), other=0.0)
    page = tl.load(row_pages + at // Z, mask=at < start, other=0).to(tl.int64)
    old_sum = tl.load(decays_ptr + (page * Z + at % Z) * N + n, mask=at < start, other=0.0)
    # The sum up to the last old token, then the new ones'.
    g += tl.where((at == start) & (j > 0), tl.sum(tl.where(at == start - 1, old_sum, 0.0), 0), 0.0)
    return tl.where(at < start, old_sum, tl.cumsum(g, 0))


@triton.jit
def _inverse(
    system, j, C: tl.constexpr, SOLVED: tl.constexpr, DOUBLINGS: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """Return the inverse of 1 + system, where system is [C, C] and strictly lower triangular.

    The blocks on the diagonal, which have no columns in common, are inverted in parallel, row i
    from the rows before it. Then blocks of twice the size: where A and D are inverses of two blocks
    and B is the system below A, the inverse of both has -D B A there. dtype: of the products.
    """
    one = tl.where(j[:, None] == j[None, :], 1.0, 0.0)
    is_near = j[:, None] // SOLVED == j[None, :] // SOLVED
    near = tl.where(is_near, system, 0.0)
    inverse = one - near
    if SOLVED > 2:
        inverse = one
        for i in range(1, SOLVED):
            is_row = (j % SOLVED == i)[:, None]
            weights = tl.sum(tl.where(is_row, near, 0.0), 0)
            found = tl.sum(weights[:, None] * inverse, 0)
            inverse -= tl.where(is_row & is_near, found[None, :], 0.0)
    for doubling in tl.static_range(DOUBLINGS):
        block = j // (SOLVED << doubling)
        is_below = (block[:, None] == block[None, :] + 1) & (block % 2 == 1)[:, None]
        below = tl.where(is_below, system, 0.0).to(dtype)
        blocks = inverse.to(dtype)
        left = tl.dot(blocks, below, input_precision="ieee").to(dtype)
        inverse -= tl.dot(left, blocks, input_precision="ieee")
    return inverse


@triton.jit(
    do_not_specialize=["num_rows", "rows_stride"],
    do_not_specialize_on_alignment=["rows_ptr", "slots_ptr", "decays_ptr"],
)
def _delta_prepare(
    mixed_ptr, g_ptr, beta_ptr, keys_ptr, decays_ptr, slots_ptr, scale, inverses_ptr, scores_ptr,
    factors_ptr, row_table_ptr, rows_ptr, num_rows, rows_stride,
    ROW_STRIDE: tl.constexpr, N: tl.constexpr, K: tl.constexpr, H: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, Z: tl.constexpr, BLOCK_H: tl.constexpr, IS_FLOAT32: tl.constexpr,
    IS_DELTA: tl.constexpr, BLOCK_B: tl.constexpr, SOLVED: tl.constexpr, DOUBLINGS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    number = tl.program_id(0)
    n = tl.program_id(1)
    b = tl.arange(0, BLOCK_B)
    ends = tl.load(rows_ptr + 3 * rows_stride + b, mask=b < num_rows, other=0)
    starts = ends - tl.load(rows_ptr + 2 * rows_stride + b, mask=b < num_rows, other=0)
    counts = tl.where(b < num_rows, tl.cdiv(ends, C) - starts // C, 0)
    before = tl.cumsum(counts, 0) - counts
    row = tl.sum(((before + counts <= number) & (b < num_rows)).to(tl.int32), 0)
    if row == num_rows:
        return
    end = tl.load(rows_ptr + 3 * rows_stride + row)
    start = end - tl.load(rows_ptr + 2 * rows_stride + row)
    first = tl.load(rows_ptr + rows_stride + row)
    base = (start // C + number - tl.sum(tl.where(b == row, before, 0), 0)) * C
    row_pages = row_table_ptr + tl.load(rows_ptr + row).to(tl.int64) * ROW_STRIDE
    j = tl.arange(0, C)
    h = tl.arange(0, BLOCK_H)
    key_head = n // (N // K)
    D: tl.constexpr = 2 * K * H + N * V
    # The interval's first token; before the row's first, no token is read.
    token = (first + base - start).to(tl.int64)
    mixed = mixed_ptr + token * D
    at = base + j
    is_new = (at >= start) & (at < end)
    k = interval_keys(
        mixed, keys_ptr, row_pages, start, end, base, key_head, j, h, K, H, D, Z, True
    )
    q = interval_queries(mixed, start, end, base, key_head, j, h, H, D)
    decay = _decays(g_ptr, decays_ptr, row_pages, start, end, base, token, n, j, N, Z)
    k_factor = tl.full([C], 1.0, tl.float32)
    q_factor = tl.full([C], 1.0, tl.float32)
    if IS_DELTA:
        k_factor = _norm_factor(k)
        q_factor = scale * _norm_factor(q)
    is_past = j[:, None] >= j[None, :]
    between = tl.exp(tl.where(is_past, decay[:, None] - decay[None, :], 0.0)) * k_factor[None, :]

    # Products of 16 bits are exact in any case.
    precision: tl.constexpr = "ieee" if IS_FLOAT32 else "tf32"
    place = number.to(tl.int64) * N + n
    square = place * C * C + j[:, None] * C + j[None, :]
    scores = tl.dot(q, tl.trans(k), input_precision=precision) * q_factor[:, None]
    scores = tl.where(is_past, scores * between, 0.0)
    tl.store(scores_ptr + square, scores.to(scores_ptr.dtype.element_ty))
    if IS_DELTA:
        beta = tl.load(beta_ptr + (token + j) * N + n, mask=is_new, other=0.0)
        system = tl.dot(k, tl.trans(k), input_precision=precision) * (beta * k_factor)[:, None]
        system = tl.where(j[:, None] > j[None, :], system * between, 0.0)
        inverse = _inverse(system, j, C, SOLVED, DOUBLINGS, inverses_ptr.dtype.element_ty)
        tl.store(inverses_ptr + square, inverse.to(inverses_ptr.dtype.element_ty))
    tl.store(factors_ptr + place * 3 * C + j, decay)
    tl.store(factors_ptr + place * 3 * C + C + j, k_factor)
    tl.store(factors_ptr + place * 3 * C + 2 * C + j, q_factor)

    if base + C > end:  # later steps need these rows
        slot = tl.load(slots_ptr + token + j, mask=is_new, other=-1).to(tl.int64)
        kept = is_new & (slot >= 0)
        tl.store(decays_ptr + slot * N + n, decay, mask=kept)
        if n % (N // K) == 0:
            tl.store(keys_ptr + (slot[:, None] * K + key_head) * H + h[None, :],
                     k, mask=kept[:, None] & (h[None, :] < H))  # fmt: skip


launch_prepare = Launcher(_delta_prepare)
