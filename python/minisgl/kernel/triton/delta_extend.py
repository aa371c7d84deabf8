"""The gated delta rule, or Mamba2, of prompts, interval by interval (decision 0024).

Two kernels. `_delta_solve` has one interval of a row and one value head, all side by side: the
inverse of the interval's triangular system. `_delta_scan` has one row, one value head and a block
of the value dim, and goes through the row's intervals with matrix products alone. (Both parts are
those of Yang et al., "Parallelizing Linear Transformers with the Delta Rule", 2024.) Mamba2 has no
system to solve, so `_delta_scan` alone.

An interval's tokens before the row's first are old: their rows are in the pool.

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
    block_h = max(power_of_2(key_dim), 16)
    block_v = min(BLOCK_V, max(power_of_2(value_dim), 16))
    is_float32 = mixed_TD.dtype == torch.float32
    shape = (
        row_table.stride(0), state_table.stride(0), num_heads, keys.shape[1], key_dim, value_dim,
        interval, page_size, max(power_of_2(num_rows), 16), block_h, is_float32,
    )  # fmt: skip
    common = (row_table, rows, num_rows, rows.stride(0))
    if skip_N is None:
        most = num_tokens // interval + 2 * num_rows  # intervals: the first and last may be cut off
        inverses = torch.empty(
            (most, num_heads, interval, interval), dtype=torch.float32, device=states.device
        )
        sums = torch.empty((most, num_heads, interval), dtype=torch.float32, device=states.device)
        _launch_solve(
            (most, num_heads, 1),
            (mixed_TD, g_TN, beta_TN, keys, decays, inverses, sums, *common), shape,
            dtype=mixed_TD.dtype, num_warps=4,
        )  # fmt: skip
        special = (inverses, sums)
    else:
        special = (g_TN, skip_N)
    _launch_scan(
        (num_rows, num_heads, -(-value_dim // block_v)),
        (
            mixed_TD, beta_TN, states, keys, updates, decays, slots, *special, state_table,
            out_TNV, key_dim**-0.5, *common,
        ),
        (*shape, block_v, skip_N is None),
        dtype=mixed_TD.dtype, num_warps=8, num_stages=1,
    )  # fmt: skip


@triton.jit
def _keys(
    mixed, keys_ptr, row_pages, start, end, base, key_head, j, h,
    K: tl.constexpr, H: tl.constexpr, D: tl.constexpr, Z: tl.constexpr, IS_DELTA: tl.constexpr,
):  # fmt: skip
    """The interval's keys [C, H], normed for the delta rule; zeros where it has no token. mixed: of
    its first."""
    at = base + j
    in_h = h[None, :] < H
    is_new = (at >= start) & (at < end)
    x = tl.load(mixed + j[:, None] * D + (K + key_head) * H + h[None, :],
                mask=is_new[:, None] & in_h, other=0.0).to(tl.float32)  # fmt: skip
    if base < start:
        page = tl.load(row_pages + at // Z, mask=at < start, other=0).to(tl.int64)
        x += tl.load(keys_ptr + ((page * Z + at % Z)[:, None] * K + key_head) * H + h[None, :],
                     mask=(at < start)[:, None] & in_h, other=0.0).to(tl.float32)  # fmt: skip
    if IS_DELTA:
        x = x * tl.rsqrt(tl.sum(x * x, 1) + 1e-6)[:, None]
    return x


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


@triton.jit(
    do_not_specialize=["num_rows", "rows_stride"],
    do_not_specialize_on_alignment=["rows_ptr", "decays_ptr"],
)
def _delta_solve(
    mixed_ptr, g_ptr, beta_ptr, keys_ptr, decays_ptr, inverses_ptr, sums_ptr, row_table_ptr,
    rows_ptr, num_rows, rows_stride,
    ROW_STRIDE: tl.constexpr, STATE_STRIDE: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    H: tl.constexpr, V: tl.constexpr, C: tl.constexpr, Z: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_H: tl.constexpr, IS_FLOAT32: tl.constexpr, PDL: tl.constexpr,
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
    # The interval's first token; before the row's first, no token is read.
    token = (first + base - start).to(tl.int64)
    k = _keys(mixed_ptr + token * (2 * K * H + N * V), keys_ptr, row_pages, start, end, base,
              key_head, j, h, K, H, 2 * K * H + N * V, Z, True)  # fmt: skip
    at = base + j
    is_new = (at >= start) & (at < end)
    decay = _decays(g_ptr, decays_ptr, row_pages, start, end, base, token, n, j, N, Z)
    beta = tl.load(beta_ptr + (token + j) * N + n, mask=is_new, other=0.0)

    precision: tl.constexpr = "ieee" if IS_FLOAT32 else "tf32"
    system = tl.dot(k, tl.trans(k), input_precision=precision) * beta[:, None]
    lower = (j[:, None] > j[None, :]) & is_new[:, None] & (at >= start)[None, :]
    system = tl.where(lower, system * tl.exp(decay[:, None] - decay[None, :]), 0.0)
    # Row i of the inverse from the rows before it.
    inverse = tl.where(j[:, None] == j[None, :], 1.0, 0.0)
    for i in range(1, C):
        weights = tl.sum(tl.where(j[:, None] == i, system, 0.0), 0)
        found = tl.sum(weights[:, None] * inverse, 0)
        inverse -= tl.where(j[:, None] == i, found[None, :], 0.0)
    place = number.to(tl.int64) * N + n
    tl.store(inverses_ptr + place * C * C + j[:, None] * C + j[None, :], inverse)
    tl.store(sums_ptr + place * C + j, decay)


@triton.jit(
    do_not_specialize=["num_rows", "rows_stride"],
    do_not_specialize_on_alignment=["rows_ptr", "slots_ptr", "decays_ptr"],
)
def _delta_scan(
    mixed_ptr, beta_ptr, states_ptr, keys_ptr, updates_ptr, decays_ptr, slots_ptr, inverses_ptr,
    sums_ptr, state_table_ptr, out_ptr, scale, row_table_ptr, rows_ptr, num_rows, rows_stride,
    ROW_STRIDE: tl.constexpr, STATE_STRIDE: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    H: tl.constexpr, V: tl.constexpr, C: tl.constexpr, Z: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_H: tl.constexpr, IS_FLOAT32: tl.constexpr, BLOCK_V: tl.constexpr, IS_DELTA: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    # For Mamba2 `inverses_ptr` has the log decays, and `sums_ptr` what multiplies the values.
    begin(PDL)
    row = tl.program_id(0)
    n = tl.program_id(1)
    precision: tl.constexpr = "ieee" if IS_FLOAT32 else "tf32"
    D: tl.constexpr = 2 * K * H + N * V
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

    for base in range(begin_at, end, C):
        place = number.to(tl.int64) * N + n
        number += 1
        at = base + j
        is_old = at < start
        is_new = (at >= start) & (at < end)
        token = (first + base - start).to(tl.int64)
        mixed = mixed_ptr + token * D
        k = _keys(mixed, keys_ptr, row_pages, start, end, base, key_head, j, h,
                  K, H, D, Z, IS_DELTA)  # fmt: skip
        q = tl.load(mixed + j[:, None] * D + key_head * H + h[None, :],
                    mask=is_new[:, None] & (h[None, :] < H), other=0.0).to(tl.float32)  # fmt: skip
        if IS_DELTA:
            q = q * (scale * tl.rsqrt(tl.sum(q * q, 1) + 1e-6))[:, None]
        value = tl.load(mixed + j[:, None] * D + 2 * K * H + n * V + v[None, :],
                        mask=is_new[:, None] & in_v, other=0.0).to(tl.float32)  # fmt: skip
        beta = tl.load(beta_ptr + (token + j) * N + n, mask=is_new, other=0.0)
        if IS_DELTA:
            decay = tl.load(sums_ptr + place * C + j)
        else:
            decay = _decays(inverses_ptr, decays_ptr, row_pages, start, end, base, token, n, j,
                            N, Z)  # fmt: skip
        between = tl.exp(tl.where(j[:, None] >= j[None, :], decay[:, None] - decay[None, :], 0.0))
        faded = tl.exp(decay)[:, None]

        updates = tl.zeros([C, BLOCK_V], tl.float32)
        if base < start:
            page = tl.load(row_pages + at // Z, mask=is_old, other=0).to(tl.int64)
            updates = tl.load(
                updates_ptr + ((page * Z + at % Z)[:, None] * N + n) * V + v[None, :],
                mask=is_old[:, None] & in_v, other=0.0,
            )  # fmt: skip
        if IS_DELTA:
            right = value - faded * tl.dot(k, state, input_precision=precision)
            if base < start:
                pairs = tl.dot(k, tl.trans(k), input_precision=precision) * between
                pairs = tl.where(is_old[None, :] & is_new[:, None], pairs, 0.0)
                right -= tl.dot(pairs, updates, input_precision=precision)
            inverse = tl.load(inverses_ptr + place * C * C + j[:, None] * C + j[None, :])
            updates += tl.dot(inverse, beta[:, None] * right, input_precision=precision)
        else:
            updates += beta[:, None] * value

        scores = tl.dot(q, tl.trans(k), input_precision=precision) * between
        scores = tl.where(j[:, None] >= j[None, :], scores, 0.0)
        out = faded * tl.dot(q, state, input_precision=precision)
        out += tl.dot(scores, updates, input_precision=precision)
        if not IS_DELTA:
            out += tl.load(sums_ptr + n) * value
        tl.store(out_ptr + (token * N + n) * V + j[:, None] * (N * V) + v[None, :],
                 out.to(out_ptr.dtype.element_ty), mask=is_new[:, None] & in_v)  # fmt: skip

        if base + C <= end:
            last = tl.sum(tl.where(j == C - 1, decay, 0.0), 0)
            weighted = k * tl.exp(last - decay)[:, None]
            state = state * tl.exp(last)
            state += tl.dot(tl.trans(weighted), updates, input_precision=precision)
            if base + C == newest:
                page = tl.load(state_pages + newest // Z - 1).to(tl.int64)
                tl.store(states_ptr + (page * N + n) * H * V + tile, state, mask=in_tile)
        else:
            slot = tl.load(slots_ptr + token + j, mask=is_new, other=-1).to(tl.int64)
            kept = is_new & (slot >= 0)
            tl.store(updates_ptr + (slot[:, None] * N + n) * V + v[None, :], updates,
                     mask=kept[:, None] & in_v)  # fmt: skip
            if tl.program_id(2) == 0:
                tl.store(decays_ptr + slot * N + n, decay, mask=kept)
                if n % (N // K) == 0:
                    raw = tl.load(mixed + j[:, None] * D + (K + key_head) * H + h[None, :],
                                  mask=kept[:, None] & (h[None, :] < H), other=0.0)  # fmt: skip
                    tl.store(keys_ptr + (slot[:, None] * K + key_head) * H + h[None, :], raw,
                             mask=kept[:, None] & (h[None, :] < H))  # fmt: skip


_launch_solve = Launcher(_delta_solve)
_launch_scan = Launcher(_delta_scan)
