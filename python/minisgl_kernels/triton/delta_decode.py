"""The gated delta rule, or Mamba2, of decode rows: each state is read once (decision 0024).

A program has one row, a block of the value dim, and one or more of the value heads that share a key
head: they share the products of keys with the query and the key. The token at which an interval
ends writes the next state instead of a row.

Axes: B rows, N value heads, K key heads, H key dim, V value dim, D channels of the convolution.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from minisgl.kernel.triton.launch import Launcher, begin, power_of_2
from minisgl_kernels.delta_decode import DeltaDecode
from minisgl_zoo.recurrent.delta_rule import DeltaStep


@dataclass(frozen=True, slots=True)
class Blocks:
    """The most value heads of a program, the values of each, and the warps."""

    heads: int
    values: int
    warps: int


FEW, MANY = Blocks(1, 64, 4), Blocks(4, 64, 4)
FROM_ROWS = 16
"""From here on a program has `MANY`. A layer of Qwen3.6-27B on an H200, 0 to 62 tokens behind its
states: 16 rows 31 us, 34 with `FEW`; 128 rows 221 and 234; one row 9 and 5."""


def decode(step: DeltaStep, num_rows: int, hopper: DeltaDecode | None = None) -> None:
    """Write the outputs of the first rows, of one token each. hopper: replaces this kernel where it
    can."""
    if hopper and hopper.takes(step):
        hopper.decode(step, num_rows)
        return
    num_heads, num_key_heads = step.num_heads, step.num_key_heads
    key_dim, value_dim = step.states.shape[2:]
    blocks = FEW if num_rows < FROM_ROWS else MANY
    sharing = num_heads // num_key_heads
    heads = next(count for count in range(blocks.heads, 0, -1) if sharing % count == 0)
    block_v = min(blocks.values, max(power_of_2(value_dim), 16))
    _launch_decode(
        (num_rows, num_heads // heads, -(-value_dim // block_v)),
        (
            step.mixed_TD, step.g_TN, step.beta_TN, step.states, step.keys, step.updates,
            step.decays, step.slots, step.rows, step.row_table, step.state_table, step.out_TNV,
            step.beta_TN if step.skip_N is None else step.skip_N, key_dim**-0.5,
            step.rows.stride(0),
        ),
        (
            step.row_table.stride(0), step.state_table.stride(0), num_heads, num_key_heads, key_dim,
            value_dim, step.interval, step.page_size, max(power_of_2(key_dim), 16), block_v,
            max(power_of_2(step.interval), 16), heads, step.skip_N is None,
        ),
        dtype=step.mixed_TD.dtype, num_warps=blocks.warps,
    )  # fmt: skip


STEP_J: tl.constexpr = tl.constexpr(16)  # rows at a time where an interval ends


@triton.jit(
    do_not_specialize=["rows_stride"],
    # A layer's decays may begin anywhere: other layers' slots and heads lie before them.
    do_not_specialize_on_alignment=["slots_ptr", "rows_ptr", "decays_ptr"],
)
def _delta_decode(
    mixed_ptr, g_ptr, beta_ptr, states_ptr, keys_ptr, updates_ptr, decays_ptr, slots_ptr, rows_ptr,
    row_table_ptr, state_table_ptr, out_ptr, skip_ptr, scale, rows_stride,
    ROW_STRIDE: tl.constexpr, STATE_STRIDE: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    H: tl.constexpr, V: tl.constexpr, C: tl.constexpr, Z: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_J: tl.constexpr, HEADS: tl.constexpr, IS_DELTA: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    row = tl.program_id(0)
    key_head = tl.program_id(1) * HEADS // (N // K)
    v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    h = tl.arange(0, BLOCK_H)
    in_h, in_v = h < H, v < V
    table_idx = tl.load(rows_ptr + row).to(tl.int64)
    token = tl.load(rows_ptr + rows_stride + row).to(tl.int64)
    position = tl.load(rows_ptr + 3 * rows_stride + row) - 1
    base = position // C * C
    ends = (position + 1) % C == 0
    slot = tl.load(slots_ptr + token).to(tl.int64)
    row_pages = row_table_ptr + table_idx * ROW_STRIDE
    state_pages = state_table_ptr + table_idx * STATE_STRIDE
    page = tl.load(state_pages + base // Z - 1, mask=base > 0, other=0).to(tl.int64)
    next_page = tl.load(state_pages + (position + 1) // Z - 1, mask=ends, other=0).to(tl.int64)

    mixed = mixed_ptr + token * (2 * K * H + N * V)
    key = tl.load(mixed + (K + key_head) * H + h, mask=in_h, other=0.0)
    q = tl.load(mixed + key_head * H + h, mask=in_h, other=0.0).to(tl.float32)
    k = key.to(tl.float32)
    at = base + tl.arange(0, BLOCK_J)
    in_j = at < position
    old = tl.load(row_pages + at // Z, mask=in_j, other=0).to(tl.int64) * Z + at % Z
    last = tl.load(row_pages + (position - 1) // Z, mask=position > base, other=0).to(tl.int64)
    last = last * Z + (position - 1) % Z
    keys = tl.load(keys_ptr + (old[:, None] * K + key_head) * H + h[None, :],
                   mask=in_j[:, None] & in_h[None, :], other=0.0).to(tl.float32)  # fmt: skip
    if IS_DELTA:
        q = q * (scale * tl.rsqrt(tl.sum(q * q, 0) + 1e-6))
        k = k * tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
        keys *= tl.rsqrt(tl.sum(keys * keys, 1) + 1e-6)[:, None]
    with_q, with_k = tl.sum(keys * q[None, :], 1), tl.sum(keys * k[None, :], 1)
    tile = h[:, None] * V + v[None, :]
    in_tile = in_h[:, None] & in_v[None, :]
    for head in range(HEADS):
        n = tl.program_id(1) * HEADS + head
        decay = tl.load(g_ptr + token * N + n)
        decay += tl.load(decays_ptr + last * N + n, mask=position > base, other=0.0)
        here = states_ptr + (page * N + n) * H * V + tile
        state = tl.load(here, mask=in_tile & (base > 0), other=0.0)
        updates = tl.load(updates_ptr + (old[:, None] * N + n) * V + v[None, :],
                          mask=in_j[:, None] & in_v[None, :], other=0.0)  # fmt: skip
        between = tl.exp(decay - tl.load(decays_ptr + old * N + n, mask=in_j, other=0.0))
        weight = tl.where(in_j, between, 0.0)
        out = tl.exp(decay) * tl.sum(state * q[:, None], 0)
        out += tl.sum((weight * with_q)[:, None] * updates, 0)
        value = tl.load(mixed + 2 * K * H + n * V + v, mask=in_v, other=0.0).to(tl.float32)
        update = value
        if IS_DELTA:
            update -= tl.exp(decay) * tl.sum(state * k[:, None], 0)
            update -= tl.sum((weight * with_k)[:, None] * updates, 0)
        update *= tl.load(beta_ptr + token * N + n)
        out += tl.sum(q * k, 0) * update
        if not IS_DELTA:
            out += tl.load(skip_ptr + n) * value
        tl.store(out_ptr + (token * N + n) * V + v, out.to(out_ptr.dtype.element_ty), mask=in_v)
        if ends:
            state = tl.exp(decay) * state + k[:, None] * update[None, :]
            for first in range(base, position, STEP_J):  # one product of all takes more registers
                at_step = first + tl.arange(0, STEP_J)
                some = at_step < position
                row_page = tl.load(row_pages + at_step // Z, mask=some, other=0).to(tl.int64)
                each = row_page * Z + at_step % Z
                some_keys = tl.load(keys_ptr + (each[:, None] * K + key_head) * H + h[None, :],
                                    mask=some[:, None] & in_h[None, :], other=0.0)  # fmt: skip
                some_keys = some_keys.to(tl.float32)
                if IS_DELTA:
                    some_keys *= tl.rsqrt(tl.sum(some_keys * some_keys, 1) + 1e-6)[:, None]
                since = tl.exp(decay - tl.load(decays_ptr + each * N + n, mask=some, other=0.0))
                some_updates = tl.load(updates_ptr + (each[:, None] * N + n) * V + v[None, :],
                                       mask=some[:, None] & in_v[None, :], other=0.0)  # fmt: skip
                weighted = tl.trans(some_keys * tl.where(some, since, 0.0)[:, None])
                state += tl.dot(weighted, some_updates, input_precision="ieee")
            tl.store(states_ptr + (next_page * N + n) * H * V + tile, state, mask=in_tile)
        elif slot >= 0:
            tl.store(updates_ptr + (slot * N + n) * V + v, update, mask=in_v)
            if tl.program_id(2) == 0:
                tl.store(decays_ptr + slot * N + n, decay)
                if n % (N // K) == 0:
                    tl.store(keys_ptr + (slot * K + key_head) * H + h, key, mask=in_h)


_launch_decode = Launcher(_delta_decode)
