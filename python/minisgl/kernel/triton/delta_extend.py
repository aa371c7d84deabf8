"""The gated delta rule, or Mamba2, of prompts, interval by interval (decision 0024).

Two kernels. `_delta_prepare` has one interval of a row and one value head, all side by side, and
computes what does not depend on the state: the inverse of the interval's triangular system, and the
scores of its queries. `_delta_scan` has one row, one value head and a block of the value dim, and
goes through the row's intervals. (Both parts are those of Yang et al., "Parallelizing Linear
Transformers with the Delta Rule", 2024.) Mamba2 has no system to solve.

An interval's tokens before the row's first are old: their keys, updates and decays are in the pool.
They are rows of the system like new tokens, but their updates are known.

Axes: B rows, N value heads, K key heads, H key dim, V value dim, C tokens of an interval (i, j).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.sizes import power_of_2
from minisgl.kernel.triton.launch import Launcher, begin

BLOCK_V = 32
SCAN_WARPS, SCAN_STAGES = 4, 2
SOLVED = 16
"""Rows of the blocks on the diagonal of a system that are inverted row by row, side by side. The
inverse of the whole is a few products of these: 15 dependent steps instead of 63."""


def extend(
    mixed_TD: Tensor,
    g_TN: Tensor,
    beta_TN: Tensor,
    states: Tensor,
    keys: Tensor,
    updates: Tensor,
    decays: Tensor,
    slots: Tensor,
    rows: Tensor,
    row_table: Tensor,
    state_table: Tensor,
    out_TNV: Tensor,
    skip_N: Tensor | None,
    *,
    num_tokens: int,
    interval: int,
    page_size: int,
) -> None:
    """Write the outputs of `rows`, int32 [4, B]: some columns of `PoolBatch.rows`. num_tokens:
    theirs. The others: see `minisgl.kernel.triton.delta_decode.decode`."""
    _, num_heads, key_dim, value_dim = states.shape
    num_rows = rows.shape[1]
    block_b = max(power_of_2(num_rows), 16)
    block_v = min(BLOCK_V, max(power_of_2(value_dim), 16))
    is_float32, is_delta = mixed_TD.dtype == torch.float32, skip_N is None
    # The numbers of the delta rule are at most 1, and float16 has as many digits as tf32.
    small = torch.float16 if is_delta and not is_float32 else torch.float32
    most = num_tokens // interval + 2 * num_rows  # intervals: the first and last may be cut off

    def prepared(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty((most, num_heads, *shape), dtype=dtype, device=states.device)

    inverses = prepared(interval, interval, dtype=small) if is_delta else states
    scores = prepared(interval, interval, dtype=small)
    factors = prepared(3, interval)
    common = (inverses, scores, factors, row_table, rows, num_rows, rows.stride(0))
    shape = (
        row_table.stride(0), num_heads, keys.shape[1], key_dim, value_dim, interval, page_size,
        max(power_of_2(key_dim), 16), is_float32, is_delta,
    )  # fmt: skip
    _launch_prepare(
        (most, num_heads, 1),
        (mixed_TD, g_TN, beta_TN, keys, decays, slots, key_dim**-0.5, *common),
        (*shape, block_b, min(SOLVED, interval), max((interval // SOLVED).bit_length() - 2, 0)),
        dtype=mixed_TD.dtype, num_warps=4,
    )  # fmt: skip
    _launch_scan(
        (num_rows, num_heads, -(-value_dim // block_v)),
        (
            mixed_TD, beta_TN, states, keys, updates, slots, state_table, out_TNV,
            beta_TN if is_delta else skip_N, *common,
        ),
        (*shape, block_b, state_table.stride(0), block_v),
        dtype=mixed_TD.dtype, num_warps=SCAN_WARPS, num_stages=SCAN_STAGES,
    )  # fmt: skip


@triton.jit
def _keys(
    mixed, keys_ptr, row_pages, start, end, base, key_head, j, h,
    K: tl.constexpr, H: tl.constexpr, D: tl.constexpr, Z: tl.constexpr, HAS_OLD: tl.constexpr,
):  # fmt: skip
    """The interval's keys [C, H]; zeros where it has no token. mixed: of its first."""
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
def _queries(
    mixed, start, end, base, key_head, j, h, H: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """The queries [C, H] of the interval's new tokens; zeros elsewhere."""
    is_new = (base + j >= start) & (base + j < end)
    return tl.load(mixed + j[:, None] * D + key_head * H + h[None, :],
                   mask=is_new[:, None] & (h[None, :] < H), other=0.0)  # fmt: skip


@triton.jit
def _dot(a, b, IS_FLOAT32: tl.constexpr):
    """a, in the model's dtype, times b in float32. Of bfloat16 two products are as exact as one of
    tf32, and a needs no registers."""
    if a.dtype == tl.bfloat16:
        high = b.to(tl.bfloat16)
        return tl.dot(a, (b - high.to(tl.float32)).to(tl.bfloat16), acc=tl.dot(a, high))
    precision: tl.constexpr = "ieee" if IS_FLOAT32 else "tf32"
    return tl.dot(a.to(tl.float32), b, input_precision=precision)


@triton.jit
def _norm_factor(x):
    x = x.to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, 1) + 1e-6)


@triton.jit
def _decays(
    g_ptr, decays_ptr, row_pages, start, end, base, token, n, j, N: tl.constexpr, Z: tl.constexpr,
):  # fmt: skip
    """The sums of the interval's log decays [C]. token: of its first."""
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
    IS_FLOAT32: tl.constexpr,
):  # fmt: skip
    """The inverse of 1 + system, which is [C, C] and has nothing on and above its diagonal.

    The blocks on the diagonal are inverted side by side, row i from those before it: no two of them
    have a column in common. With `blocks` their inverse and `x` its product with the rest, which is
    0 when it is multiplied with itself as often as there are blocks, the inverse is
    (1 - x) (1 + x^2) (1 + x^4) ... blocks.
    """
    precision: tl.constexpr = "ieee" if IS_FLOAT32 else "tf32"
    one = tl.where(j[:, None] == j[None, :], 1.0, 0.0)
    is_near = j[:, None] // SOLVED == j[None, :] // SOLVED
    near = tl.where(is_near, system, 0.0)
    blocks = one
    for i in range(1, SOLVED):
        is_row = (j % SOLVED == i)[:, None]
        weights = tl.sum(tl.where(is_row, near, 0.0), 0)
        found = tl.sum(weights[:, None] * blocks, 0)
        blocks -= tl.where(is_row & is_near, found[None, :], 0.0)
    if C == SOLVED:
        return blocks
    x = tl.dot(blocks, system - near, input_precision=precision)
    inverse = one - x
    for _ in tl.static_range(DOUBLINGS):
        x = tl.dot(x, x, input_precision=precision)
        inverse = tl.dot(inverse, one + x, input_precision=precision)
    return tl.dot(inverse, blocks, input_precision=precision)


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
    k = _keys(mixed, keys_ptr, row_pages, start, end, base, key_head, j, h, K, H, D, Z, True)
    q = _queries(mixed, start, end, base, key_head, j, h, H, D)
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
        inverse = _inverse(system, j, C, SOLVED, DOUBLINGS, IS_FLOAT32)
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


@triton.jit(
    do_not_specialize=["num_rows", "rows_stride"],
    do_not_specialize_on_alignment=["rows_ptr", "slots_ptr"],
)
def _delta_scan(
    mixed_ptr, beta_ptr, states_ptr, keys_ptr, updates_ptr, slots_ptr, state_table_ptr, out_ptr,
    skip_ptr, inverses_ptr, scores_ptr, factors_ptr, row_table_ptr, rows_ptr, num_rows, rows_stride,
    ROW_STRIDE: tl.constexpr, N: tl.constexpr, K: tl.constexpr, H: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, Z: tl.constexpr, BLOCK_H: tl.constexpr, IS_FLOAT32: tl.constexpr,
    IS_DELTA: tl.constexpr, BLOCK_B: tl.constexpr, STATE_STRIDE: tl.constexpr,
    BLOCK_V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    row = tl.program_id(0)
    n = tl.program_id(1)
    b = tl.arange(0, BLOCK_B)
    earlier = b < row
    all_ends = tl.load(rows_ptr + 3 * rows_stride + b, mask=earlier, other=0)
    all_starts = all_ends - tl.load(rows_ptr + 2 * rows_stride + b, mask=earlier, other=0)
    number = tl.sum(tl.where(earlier, tl.cdiv(all_ends, C) - all_starts // C, 0), 0)
    end = tl.load(rows_ptr + 3 * rows_stride + row)
    start = end - tl.load(rows_ptr + 2 * rows_stride + row)
    first = tl.load(rows_ptr + rows_stride + row)
    table_idx = tl.load(rows_ptr + row).to(tl.int64)
    row_pages = row_table_ptr + table_idx * ROW_STRIDE
    state_pages = state_table_ptr + table_idx * STATE_STRIDE
    begin_at = start // C * C
    newest = end // C * C
    key_head = n // (N // K)
    j = tl.arange(0, C)
    h = tl.arange(0, BLOCK_H)
    v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_v = v[None, :] < V
    tile = h[:, None] * V + v[None, :]
    in_tile = (h[:, None] < H) & in_v
    state = tl.zeros([BLOCK_H, BLOCK_V], tl.float32)
    if begin_at > 0:
        page = tl.load(state_pages + begin_at // Z - 1).to(tl.int64)
        state = tl.load(states_ptr + (page * N + n) * H * V + tile, mask=in_tile, other=0.0)

    if begin_at < start:
        state = _interval(
            state, begin_at, number, end, start, first, newest, row_pages, state_pages, n,
            key_head, j, h, v, mixed_ptr, beta_ptr, states_ptr, keys_ptr, updates_ptr, slots_ptr,
            out_ptr, skip_ptr, inverses_ptr, scores_ptr, factors_ptr,
            N, K, H, V, C, Z, IS_FLOAT32, IS_DELTA, True,
        )  # fmt: skip
        begin_at += C
        number += 1
    for base in range(begin_at, end, C):
        state = _interval(
            state, base, number, end, start, first, newest, row_pages, state_pages, n,
            key_head, j, h, v, mixed_ptr, beta_ptr, states_ptr, keys_ptr, updates_ptr, slots_ptr,
            out_ptr, skip_ptr, inverses_ptr, scores_ptr, factors_ptr,
            N, K, H, V, C, Z, IS_FLOAT32, IS_DELTA, False,
        )  # fmt: skip
        number += 1


@triton.jit
def _interval(
    state, base, number, end, start, first, newest, row_pages, state_pages, n,
    key_head, j, h, v, mixed_ptr, beta_ptr, states_ptr, keys_ptr, updates_ptr, slots_ptr,
    out_ptr, skip_ptr, inverses_ptr, scores_ptr, factors_ptr,
    N: tl.constexpr, K: tl.constexpr, H: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    Z: tl.constexpr, IS_FLOAT32: tl.constexpr, IS_DELTA: tl.constexpr, HAS_OLD: tl.constexpr,
):  # fmt: skip
    """Compute the interval at `base`. Returns the state at its end, if the row reaches it."""
    precision: tl.constexpr = "ieee" if IS_FLOAT32 else "tf32"
    D: tl.constexpr = 2 * K * H + N * V
    place = number.to(tl.int64) * N + n
    at = base + j
    in_v = v[None, :] < V
    square = j[:, None] * C + j[None, :]
    is_new = (at >= start) & (at < end)
    token = (first + base - start).to(tl.int64)
    mixed = mixed_ptr + token * D
    k = _keys(mixed, keys_ptr, row_pages, start, end, base, key_head, j, h, K, H, D, Z, HAS_OLD)
    q = _queries(mixed, start, end, base, key_head, j, h, H, D)
    value = tl.load(mixed + j[:, None] * D + 2 * K * H + n * V + v[None, :],
                    mask=is_new[:, None] & in_v, other=0.0).to(tl.float32)  # fmt: skip
    beta = tl.load(beta_ptr + (token + j) * N + n, mask=is_new, other=0.0)
    decay = tl.load(factors_ptr + place * 3 * C + j)
    k_factor = tl.load(factors_ptr + place * 3 * C + C + j)
    q_factor = tl.load(factors_ptr + place * 3 * C + 2 * C + j)
    faded = tl.exp(decay)

    updates = value
    if IS_DELTA:
        updates -= (faded * k_factor)[:, None] * _dot(k, state, IS_FLOAT32)
    updates *= beta[:, None]
    if HAS_OLD:
        is_old = at < start
        page = tl.load(row_pages + at // Z, mask=is_old, other=0).to(tl.int64)
        updates += tl.load(updates_ptr + ((page * Z + at % Z)[:, None] * N + n) * V + v[None, :],
                           mask=is_old[:, None] & in_v, other=0.0)  # fmt: skip
    if IS_DELTA:
        inverse = tl.load(inverses_ptr + place * C * C + square).to(tl.float32)
        updates = tl.dot(inverse, updates, input_precision=precision)
    out = (faded * q_factor)[:, None] * _dot(q, state, IS_FLOAT32)
    scores = tl.load(scores_ptr + place * C * C + square).to(tl.float32)
    out += tl.dot(scores, updates, input_precision=precision)
    if not IS_DELTA:
        out += tl.load(skip_ptr + n) * value
    tl.store(out_ptr + (token * N + n) * V + j[:, None] * (N * V) + v[None, :],
             out.to(out_ptr.dtype.element_ty), mask=is_new[:, None] & in_v)  # fmt: skip

    if base + C <= end:
        last = tl.sum(tl.where(j == C - 1, decay, 0.0), 0)
        # Two products of bfloat16 here, with keys read as they are, gave wrong states on an H200
        # (Triton 3.6), right ones in the interpreter.
        weighted = (tl.exp(last - decay) * k_factor)[:, None] * k.to(tl.float32)
        state = state * tl.exp(last)
        state += tl.dot(tl.trans(weighted), updates, input_precision=precision)
        if base + C == newest:
            new_page = tl.load(state_pages + newest // Z - 1).to(tl.int64)
            tl.store(states_ptr + (new_page * N + n) * H * V + h[:, None] * V + v[None, :], state,
                     mask=(h[:, None] < H) & in_v)  # fmt: skip
    else:
        slot = tl.load(slots_ptr + token + j, mask=is_new, other=-1).to(tl.int64)
        kept = is_new & (slot >= 0)
        tl.store(updates_ptr + (slot[:, None] * N + n) * V + v[None, :], updates,
                 mask=kept[:, None] & in_v)  # fmt: skip
    return state


_launch_prepare = Launcher(_delta_prepare)
_launch_scan = Launcher(_delta_scan)
