"""Attention of prompts and chunks over the paged cache, any number of queries per row.

Keys and values are read from their pages (`minisgl.kernel.triton.attend`). A program has a tile of
one row's queries and one head. The device finds the row of each tile, so a captured launch serves
rows of other lengths.

Axes: T tokens, B rows, N query heads, K key/value heads, H head dim, V dims of a value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.triton.attend import (
    CAUSAL,
    WHOLE,
    attend,
    block_h_of,
    no_keys,
    rest_of,
    scaled,
    times_value_scale,
)
from minisgl.kernel.triton.launch import Launcher, begin, power_of_2, shared_kib
from minisgl.kernel.triton.quantised import kind_of, tensors_of

if TYPE_CHECKING:
    from minisgl.kvcache.pool import LayerPool

WIDEST = (64, 32, 8)
"""Queries, keys and warps of a program with heads above 256 dims, the best of ten on an H200. With
four warps the sums need all registers that a thread can have."""


def extend(
    q_TNH: Tensor,
    pool: LayerPool,
    page_table: Tensor,
    rows: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    num_tokens: int,
    longest: int,
    key_ends: Tensor | None,
    out_TNV: Tensor,
) -> None:
    """Attend with any number of queries per row, and write the result to out_TNV.

    rows: int32 [4, B], some columns of `PoolBatch.rows`, whose tokens are in q_TNH. scale, window,
    softcap, sinks: see `AttnLayer`. num_tokens, longest: upper bounds of the tokens of all rows and
    of the longest. key_ends: see `PoolBatch`.
    """
    _, num_q_heads, head_dim = q_TNH.shape
    page_size, num_kv_heads = pool.k.shape[1:3]
    value_dim = out_TNV.shape[2]
    block_h = block_h_of(value_dim)
    is_float32 = q_TNH.dtype.itemsize == 4
    wide = block_h > 128 or is_float32
    block_m, block_n, num_warps, num_stages = (64, 32, 4, 1) if wide else (128, 64, 8, 3)
    if block_h > 256 and not is_float32:
        block_m, block_n, num_warps = WIDEST
        num_stages = 2 if shared_kib() >= 192 else 1
    # 64 rows of such heads take 128 KiB, which not all GPUs have.
    is_large = block_h > (128 if is_float32 else 256)
    if longest <= 32 or (is_large and (is_float32 or shared_kib() < 128)):
        block_m, num_warps = 32, 4
    if value_dim < head_dim and (is_float32 or shared_kib() < 128):
        block_m, block_n = 16 if is_float32 else block_m, 16  # all GPUs have room for them
    num_rows = rows.shape[1]
    # A power of two, and one of a few, because each is a kernel.
    row_bucket = 1 if num_rows == 1 else 64 if num_rows <= 64 else max(power_of_2(num_rows), 1024)
    factor, cap = scaled(scale, softcap)
    num_tiles = num_tokens // block_m + num_rows  # at most: each row's last may be cut off
    _launch_extend(
        (num_tiles, num_q_heads, 1),
        (
            q_TNH, *tensors_of(pool), page_table, rows, out_TNV,
            q_TNH if sinks is None else sinks, rows if key_ends is None else key_ends, factor,
            window or 0, num_rows, rows.stride(0),
        ),
        (
            page_table.stride(0), page_size, num_q_heads, num_kv_heads, head_dim, value_dim,
            kind_of(pool), bool(window), cap, sinks is not None, key_ends is not None,
            row_bucket, block_m, block_h, block_n,
        ),
        dtype=(q_TNH.dtype, pool.k.dtype), num_warps=num_warps,
        num_stages=num_stages,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["window", "num_rows", "rows_stride"],
    do_not_specialize_on_alignment=["rows_ptr", "key_ends_ptr"],
)
def _extend(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, rows_ptr, out_ptr, sinks_ptr,
    key_ends_ptr, scale, window, num_rows, rows_stride, TABLE_STRIDE: tl.constexpr,
    Z: tl.constexpr, N: tl.constexpr, K: tl.constexpr, H: tl.constexpr, V: tl.constexpr,
    KV: tl.constexpr, WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, TWO_WAY: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    # The row of this tile is the first for which the tiles of all rows up to it are more than
    # `tile`. Tiles start in reverse order, since the last of a row see the most keys.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    b = tl.arange(0, BLOCK_B)
    tiles = tl.cdiv(tl.load(rows_ptr + 2 * rows_stride + b, mask=b < num_rows, other=0), BLOCK_M)
    before = tl.cumsum(tiles, 0) - tiles
    row = tl.sum(((before + tiles <= tile) & (b < num_rows)).to(tl.int32), 0)
    if row == num_rows:
        return
    m_first = (tile - tl.sum(tl.where(b == row, before, 0), 0)) * BLOCK_M

    length = tl.load(rows_ptr + 2 * rows_stride + row)
    end = tl.load(rows_ptr + 3 * rows_stride + row)
    start = end - length
    q_first = tl.load(rows_ptr + rows_stride + row).to(tl.int64)
    table = table_ptr + tl.load(rows_ptr + row).to(tl.int64) * TABLE_STRIDE
    m = m_first + tl.arange(0, BLOCK_M)
    h = tl.arange(0, BLOCK_H)
    query = start + m
    of_head = (q_first + m) * N + head
    in_q = (m[:, None] < length) & (h[None, :] < V)
    q = tl.load(q_ptr + of_head[:, None] * H + h[None, :], mask=in_q, other=0.0)
    q_rest = rest_of(q, q_ptr, of_head * H, m < length, H, V)
    mass, top = no_keys(sinks_ptr, head + 0 * m, m < length, SINKS, BLOCK_M)
    acc = tl.zeros([BLOCK_M, BLOCK_H], tl.float32)
    low = 0
    if WINDOWED:
        low = tl.maximum(start + m_first - window + 1, 0) // BLOCK_N * BLOCK_N
    if TWO_WAY:
        key_end = tl.load(key_ends_ptr + q_first + m, mask=m < length, other=1)
        high = tl.minimum(tl.max(key_end), end)
    else:
        key_end = query + 1
        high = tl.minimum(start + m_first + BLOCK_M, end)
    # Keys that every query of the tile sees need no mask.
    whole = low
    if not WINDOWED:
        whole = (start + m_first + 1) // BLOCK_N * BLOCK_N
    kv_head = head // (N // K)
    acc, mass, top = attend(
        acc, mass, top, q, q_rest, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table, query, key_end, h,
        kv_head, scale, window, low, whole, end, WHOLE, Z, K, H, V, KV, WINDOWED, SOFTCAP, BLOCK_N,
    )  # fmt: skip
    acc, mass, top = attend(
        acc, mass, top, q, q_rest, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table, query, key_end, h,
        kv_head, scale, window, whole, high, end, CAUSAL, Z, K, H, V, KV, WINDOWED, SOFTCAP,
        BLOCK_N,
    )  # fmt: skip
    acc = times_value_scale(acc, v_scale_ptr, kv_head, KV)
    out = (acc / mass[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + of_head[:, None] * V + h[None, :], out, mask=in_q)


_launch_extend = Launcher(_extend)
