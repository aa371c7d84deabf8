"""The gated delta rule, or Mamba2, of decode rows: each state is read once (decision 0024).

A program has one row, one value head and a block of the value dim. The token at which an interval
ends writes the next state instead of a row.

Axes: B rows, N value heads, K key heads, H key dim, V value dim, D channels of the convolution.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.triton.launch import Launcher, begin, power_of_2

BLOCK_V = 32
BLOCK_J, BLOCK_J_OF_MANY = 32, 16  # rows at a time
MANY_ROWS = 64
"""From here on 16 rows at a time. Microseconds of a layer of Qwen3.6-27B and of 35B-A3B on an H200,
with 32 and with 16. 64 rows at an interval's second token: 166 and 130, 112 and 89; in its middle
186 and 177, 125 and 121; at its end 413 and 412, 274 and 279. One row in its middle: 5.9 and 7.6.
Not measured between 1 and 64 rows."""
NUM_WARPS = 4


def decode(
    mixed_BD: Tensor,
    g_BN: Tensor,
    beta_BN: Tensor,
    states: Tensor,
    keys: Tensor,
    updates: Tensor,
    decays: Tensor,
    slots: Tensor,
    rows: Tensor,
    row_table: Tensor,
    state_table: Tensor,
    out_BNV: Tensor,
    skip_N: Tensor | None,
    *,
    num_rows: int,
    interval: int,
    page_size: int,
) -> None:
    """Write the outputs of the first rows, of one token each. mixed_BD: see `convolve`. skip_N: see
    `minisgl.attention.recurrent.RecurrentInputs`."""
    _, num_heads, key_dim, value_dim = states.shape
    block_v = min(BLOCK_V, max(power_of_2(value_dim), 16))
    _launch_decode(
        (num_rows, num_heads, -(-value_dim // block_v)),
        (
            mixed_BD, g_BN, beta_BN, states, keys, updates, decays, slots, rows, row_table,
            state_table, out_BNV, beta_BN if skip_N is None else skip_N, key_dim**-0.5,
            rows.stride(0),
        ),
        (
            row_table.stride(0), state_table.stride(0), num_heads, keys.shape[1], key_dim,
            value_dim, interval, page_size, max(power_of_2(key_dim), 16), block_v,
            BLOCK_J if num_rows < MANY_ROWS else BLOCK_J_OF_MANY,
            skip_N is None,
        ),
        dtype=mixed_BD.dtype, num_warps=NUM_WARPS,
    )  # fmt: skip


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
    BLOCK_V: tl.constexpr, BLOCK_J: tl.constexpr, IS_DELTA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    row = tl.program_id(0)
    n = tl.program_id(1)
    key_head = n // (N // K)
    v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    h = tl.arange(0, BLOCK_H)
    in_h, in_v = h < H, v < V
    table_idx = tl.load(rows_ptr + row).to(tl.int64)
    token = tl.load(rows_ptr + rows_stride + row).to(tl.int64)
    position = tl.load(rows_ptr + 3 * rows_stride + row) - 1
    base = position // C * C
    slot = tl.load(slots_ptr + token).to(tl.int64)
    row_pages = row_table_ptr + table_idx * ROW_STRIDE
    state_pages = state_table_ptr + table_idx * STATE_STRIDE

    mixed = mixed_ptr + token * (2 * K * H + N * V)
    key = tl.load(mixed + (K + key_head) * H + h, mask=in_h, other=0.0)
    q = tl.load(mixed + key_head * H + h, mask=in_h, other=0.0).to(tl.float32)
    k = key.to(tl.float32)
    if IS_DELTA:
        q = q * (scale * tl.rsqrt(tl.sum(q * q, 0) + 1e-6))
        k = k * tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
    decay = tl.load(g_ptr + token * N + n)
    if position > base:
        last = tl.load(row_pages + (position - 1) // Z).to(tl.int64) * Z + (position - 1) % Z
        decay += tl.load(decays_ptr + last * N + n)

    state = tl.zeros([BLOCK_H, BLOCK_V], tl.float32)
    tile = h[:, None] * V + v[None, :]
    in_tile = in_h[:, None] & in_v[None, :]
    if base > 0:
        page = tl.load(state_pages + base // Z - 1).to(tl.int64)
        state = tl.load(states_ptr + (page * N + n) * H * V + tile, mask=in_tile, other=0.0)
        state *= tl.exp(decay)
    known = tl.zeros([BLOCK_V], tl.float32)
    if IS_DELTA:
        known += tl.sum(state * k[:, None], 0)
    out = tl.sum(state * q[:, None], 0)
    ends = (position + 1) % C == 0
    for first in range(base, position, BLOCK_J):
        at = first + tl.arange(0, BLOCK_J)
        in_j = at < position
        old = tl.load(row_pages + at // Z, mask=in_j, other=0).to(tl.int64) * Z + at % Z
        keys = tl.load(keys_ptr + (old[:, None] * K + key_head) * H + h[None, :],
                       mask=in_j[:, None] & in_h[None, :], other=0.0).to(tl.float32)  # fmt: skip
        between = tl.exp(decay - tl.load(decays_ptr + old * N + n, mask=in_j, other=0.0))
        weight = tl.where(in_j, between, 0.0)
        if IS_DELTA:
            weight *= tl.rsqrt(tl.sum(keys * keys, 1) + 1e-6)
        updates = tl.load(updates_ptr + (old[:, None] * N + n) * V + v[None, :],
                          mask=in_j[:, None] & in_v[None, :], other=0.0)  # fmt: skip
        with_q = weight * tl.sum(keys * q[None, :], 1)
        if IS_DELTA:
            with_k = weight * tl.sum(keys * k[None, :], 1)
            known += tl.sum(with_k[:, None] * updates, 0)
        out += tl.sum(with_q[:, None] * updates, 0)
        if ends:
            weighted = keys * weight[:, None]
            state += tl.dot(tl.trans(weighted), updates, input_precision="ieee")
    value = tl.load(mixed + 2 * K * H + n * V + v, mask=in_v, other=0.0).to(tl.float32)
    update = tl.load(beta_ptr + token * N + n) * (value - known)
    out += tl.sum(q * k, 0) * update
    if not IS_DELTA:
        out += tl.load(skip_ptr + n) * value
    tl.store(out_ptr + (token * N + n) * V + v, out.to(out_ptr.dtype.element_ty), mask=in_v)

    if ends:
        page = tl.load(state_pages + (position + 1) // Z - 1).to(tl.int64)
        state += k[:, None] * update[None, :]
        tl.store(states_ptr + (page * N + n) * H * V + tile, state, mask=in_tile)
    elif slot >= 0:
        tl.store(updates_ptr + (slot * N + n) * V + v, update, mask=in_v)
        if tl.program_id(2) == 0:
            tl.store(decays_ptr + slot * N + n, decay)
            if n % (N // K) == 0:
                tl.store(keys_ptr + (slot * K + key_head) * H + h, key, mask=in_h)


_launch_decode = Launcher(_delta_decode)
