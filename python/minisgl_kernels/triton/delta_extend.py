"""The gated delta rule, or Mamba2, of prompts, interval by interval (decision 0024).

Two kernels, as in Yang et al., "Parallelizing Linear Transformers with the Delta Rule" (2024). A
program of `_delta_prepare` has one interval of a row and one value head; all run in parallel, and
compute what does not depend on the state (`minisgl_kernels.triton.delta_prepare`). A program of
`_delta_scan` has one row, one value head and a block of the value dim, and computes the row's
intervals one after another; Mamba2 has no system to solve. On Hopper
`minisgl_kernels.delta_hopper` has both kernels, for most models.

An interval's tokens before the row's first are old: their keys, updates and decays are in the pool.
They are rows of the system like new tokens, but their updates are known.

Axes: B rows, N value heads, K key heads, H key dim, V value dim, C tokens of an interval (i, j).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.triton.launch import Launcher, begin, power_of_2
from minisgl_kernels.delta_hopper import DeltaPrompts
from minisgl_kernels.triton.delta_prepare import (
    SOLVED,
    interval_keys,
    interval_queries,
    launch_prepare,
)
from minisgl_zoo.recurrent.delta_rule import DeltaStep

BLOCK_V = 32
SCAN_WARPS, SCAN_STAGES = 4, 2


def extend(step: DeltaStep, num_tokens: int, hopper: DeltaPrompts | None = None) -> None:
    """Write the outputs of the rows, which have `num_tokens` tokens. hopper: replaces both kernels
    where it can."""
    _, num_heads, key_dim, value_dim = step.states.shape
    rows, interval, dtype = step.rows, step.interval, step.mixed_TD.dtype
    num_rows = rows.shape[1]
    most = num_tokens // interval + 2 * num_rows  # intervals: the first and last may be cut off
    if hopper and hopper.takes(step):
        hopper.extend(step, most)
        return
    block_b = max(power_of_2(num_rows), 16)
    block_v = min(BLOCK_V, max(power_of_2(value_dim), 16))
    is_float32, is_delta = dtype == torch.float32, step.skip_N is None
    # The numbers of the delta rule are at most 1, and float16 has as many digits as tf32.
    small = torch.float16 if is_delta and not is_float32 else torch.float32

    def prepared(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty((most, num_heads, *shape), dtype=dtype, device=step.states.device)

    inverses = prepared(interval, interval, dtype=small) if is_delta else step.states
    scores = prepared(interval, interval, dtype=small)
    factors = prepared(3, interval)
    common = (inverses, scores, factors, step.row_table, rows, num_rows, rows.stride(0))
    shape = (
        step.row_table.stride(0), num_heads, step.num_key_heads, key_dim, value_dim, interval,
        step.page_size, max(power_of_2(key_dim), 16), is_float32, is_delta,
    )  # fmt: skip
    launch_prepare(
        (most, num_heads, 1),
        (
            step.mixed_TD, step.g_TN, step.beta_TN, step.keys, step.decays, step.slots,
            key_dim**-0.5, *common,
        ),
        (*shape, block_b, SOLVED, max((interval // SOLVED).bit_length() - 1, 0)),
        dtype=dtype, num_warps=4,
    )  # fmt: skip
    _launch_scan(
        (num_rows, num_heads, -(-value_dim // block_v)),
        (
            step.mixed_TD, step.beta_TN, step.states, step.keys, step.updates, step.slots,
            step.state_table, step.out_TNV, step.beta_TN if is_delta else step.skip_N, *common,
        ),
        (*shape, block_b, step.state_table.stride(0), block_v),
        dtype=dtype, num_warps=SCAN_WARPS, num_stages=SCAN_STAGES,
    )  # fmt: skip


@triton.jit
def _dot(a, b, IS_FLOAT32: tl.constexpr):
    """Return a, in the model's dtype, times b, in float32. Two products of bfloat16 are as exact as
    one of tf32, and need no registers for a converted `a`."""
    if a.dtype == tl.bfloat16:
        high = b.to(tl.bfloat16)
        return tl.dot(a, (b - high.to(tl.float32)).to(tl.bfloat16), acc=tl.dot(a, high))
    precision: tl.constexpr = "ieee" if IS_FLOAT32 else "tf32"
    return tl.dot(a.to(tl.float32), b, input_precision=precision)


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
    k = interval_keys(
        mixed, keys_ptr, row_pages, start, end, base, key_head, j, h, K, H, D, Z, HAS_OLD
    )
    q = interval_queries(mixed, start, end, base, key_head, j, h, H, D)
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


_launch_scan = Launcher(_delta_scan)
