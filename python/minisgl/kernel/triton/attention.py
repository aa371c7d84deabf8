"""Attention over the paged cache: split-KV flash-decode, and extend for prompts and chunks.

Both read keys and values where they lie, through the page table, with an online softmax (Dao et
al., FlashAttention, 2022). Decode cuts each row's context into pieces that run side by side and
merges their partial sums (Flash-Decoding, Dao et al. 2023)::

    context of a row   |== piece 0 ==|== piece 1 ==|== piece 2 =|       a piece is a multiple of
                       0             piece         2 * piece    end     BLOCK_N, at least MIN_PIECE

How many pieces there are at most depends only on the number of rows, so a captured launch serves
every context length.

Axes: T tokens, B rows, N query heads, K key/value heads, G query heads per key/value head, H head
dim, P pages of a table row, S pieces.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634
MIN_PIECE = 64
"""Tokens: below it the merge costs more than the parallelism gives."""
MAX_PIECES = 64
PROGRAMS_PER_CORE = 8
"""Pieces are cut until so many programs exist per multiprocessor: two or more run on each at a
time, and a long row's pieces do not outlast the others."""


def num_pieces(num_rows: int, num_kv_heads: int, num_cores: int) -> int:
    """Pieces a row at most: a power of two."""
    wanted = num_cores * PROGRAMS_PER_CORE // max(num_rows * num_kv_heads, 1)
    return min(int(triton.next_power_of_2(max(wanted, 1))), MAX_PIECES)


def decode(
    q_BNH: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    page_table: Tensor,
    rows: Tensor,
    *,
    scale: float,
    window: int | None,
    pieces: int,
    out_BNH: Tensor,
) -> None:
    """One query per row. rows: `Batch.rows` [4, >= B]; only table indices and ends are read."""
    num_rows, num_q_heads, head_dim = q_BNH.shape
    num_kv_heads = k_pool.shape[2]
    group = num_q_heads // num_kv_heads
    block_h = max(triton.next_power_of_2(head_dim), 16)
    block_n = 64 if block_h <= 128 else 32
    if pieces > 1:
        shape = (num_rows, num_q_heads, pieces)
        partial = torch.empty((*shape, block_h), dtype=torch.float32, device=q_BNH.device)
        mass = torch.empty(shape, dtype=torch.float32, device=q_BNH.device)
    else:
        partial = mass = q_BNH
    _decode[(num_rows, num_kv_heads, pieces)](
        q_BNH, k_pool, v_pool, page_table, page_table.stride(0), rows, rows.stride(0),
        out_BNH, partial, mass, scale * LOG2_E, window or 0,
        Z=k_pool.shape[1], K=num_kv_heads, G=group, H=head_dim, S=pieces, WINDOWED=bool(window),
        BLOCK_G=max(triton.next_power_of_2(group), 16), BLOCK_H=block_h, BLOCK_N=block_n,
        MIN_PIECE=MIN_PIECE, num_warps=4, num_stages=3 if q_BNH.dtype.itemsize == 2 else 2,
    )  # fmt: skip
    if pieces > 1:
        _merge[(num_rows, num_q_heads)](
            partial, mass, rows, rows.stride(0), out_BNH, window or 0,
            N=num_q_heads, H=head_dim, S=pieces, WINDOWED=bool(window),
            BLOCK_H=block_h, BLOCK_N=block_n, MIN_PIECE=MIN_PIECE, num_warps=2,
        )  # fmt: skip


def extend(
    q_TNH: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    page_table: Tensor,
    rows: Tensor,
    *,
    scale: float,
    window: int | None,
    lengths: list[int],
    out_TNH: Tensor,
) -> None:
    """Any number of queries per row. rows: [4, B], of tokens in q_TNH; lengths: theirs, B."""
    _, num_q_heads, head_dim = q_TNH.shape
    num_kv_heads = k_pool.shape[2]
    block_h = max(triton.next_power_of_2(head_dim), 16)
    wide = block_h > 128 or q_TNH.dtype.itemsize == 4
    block_m, block_n = (64, 32) if wide else (128, 64)
    if max(lengths) <= 32:
        block_m = 32
    num_tiles = sum(triton.cdiv(length, block_m) for length in lengths)
    _extend[(num_tiles, num_q_heads)](
        q_TNH, k_pool, v_pool, page_table, page_table.stride(0), rows, rows.stride(0),
        out_TNH, scale * LOG2_E, window or 0, len(lengths),
        Z=k_pool.shape[1], N=num_q_heads, K=num_kv_heads, H=head_dim, WINDOWED=bool(window),
        BLOCK_B=triton.next_power_of_2(len(lengths)), BLOCK_M=block_m, BLOCK_H=block_h,
        BLOCK_N=block_n, num_warps=8 if block_m == 128 else 4, num_stages=1 if wide else 3,
    )  # fmt: skip


@triton.jit
def _piece_of(end, window, S: tl.constexpr, WINDOWED: tl.constexpr, BLOCK_N: tl.constexpr,
              MIN_PIECE: tl.constexpr):  # fmt: skip
    """(first key that is seen, tokens a piece) of a decode row."""
    low = 0
    if WINDOWED:
        low = tl.maximum(end - window, 0)
    piece = tl.cdiv(tl.cdiv(end - low, S), BLOCK_N) * BLOCK_N
    return low, tl.maximum(piece, MIN_PIECE)


@triton.jit
def _decode(
    q_ptr, k_ptr, v_ptr, table_ptr, table_stride, rows_ptr, rows_stride,
    out_ptr, partial_ptr, mass_ptr, scale, window,
    Z: tl.constexpr, K: tl.constexpr, G: tl.constexpr, H: tl.constexpr, S: tl.constexpr,
    WINDOWED: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
    MIN_PIECE: tl.constexpr,
):  # fmt: skip
    row, kv_head, index = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    end = tl.load(rows_ptr + 3 * rows_stride + row)
    low, piece = _piece_of(end, window, S, WINDOWED, BLOCK_N, MIN_PIECE)
    first = low + index * piece
    last = tl.minimum(first + piece, end)
    if first < last:
        table = table_ptr + tl.load(rows_ptr + row).to(tl.int64) * table_stride
        g = tl.arange(0, BLOCK_G)
        h = tl.arange(0, BLOCK_H)
        head = kv_head * G + g
        q_at = (row.to(tl.int64) * K * G + head[:, None]) * H + h[None, :]
        in_q = (g[:, None] < G) & (h[None, :] < H)
        q = tl.load(q_ptr + q_at, mask=in_q, other=0.0)
        top = tl.full([BLOCK_G], -float("inf"), tl.float32)
        mass = tl.zeros([BLOCK_G], tl.float32)
        acc = tl.zeros([BLOCK_G, BLOCK_H], tl.float32)
        for start in range(first, last, BLOCK_N):
            n = start + tl.arange(0, BLOCK_N)
            inside = n < last
            page = tl.load(table + n // Z, mask=inside, other=0).to(tl.int64)
            at = ((page * Z + n % Z) * K + kv_head) * H
            k = tl.load(
                k_ptr + at[None, :] + h[:, None],
                mask=inside[None, :] & (h[:, None] < H), other=0.0,
            )  # fmt: skip
            v = tl.load(
                v_ptr + at[:, None] + h[None, :],
                mask=inside[:, None] & (h[None, :] < H), other=0.0,
            )  # fmt: skip
            score = tl.dot(q, k, input_precision="ieee") * scale
            score = tl.where(inside[None, :], score, -float("inf"))
            new_top = tl.maximum(top, tl.max(score, 1))
            p = tl.exp2(score - new_top[:, None])
            shrink = tl.exp2(top - new_top)
            mass = mass * shrink + tl.sum(p, 1)
            acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
            top = new_top
        if S == 1:
            out = (acc / mass[:, None]).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + q_at, out, mask=in_q)
        else:
            at_S = ((row.to(tl.int64) * K * G + head) * S) + index
            tl.store(
                partial_ptr + at_S[:, None] * BLOCK_H + h[None, :], acc / mass[:, None],
                mask=g[:, None] < G,
            )  # fmt: skip
            tl.store(mass_ptr + at_S, top + tl.log2(mass), mask=g < G)


@triton.jit
def _merge(
    partial_ptr, mass_ptr, rows_ptr, rows_stride, out_ptr, window,
    N: tl.constexpr, H: tl.constexpr, S: tl.constexpr, WINDOWED: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, MIN_PIECE: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    end = tl.load(rows_ptr + 3 * rows_stride + row)
    low, piece = _piece_of(end, window, S, WINDOWED, BLOCK_N, MIN_PIECE)
    used = tl.arange(0, S) < tl.cdiv(end - low, piece)
    at = (row.to(tl.int64) * N + head) * S + tl.arange(0, S)
    h = tl.arange(0, BLOCK_H)
    log_mass = tl.load(mass_ptr + at, mask=used, other=-float("inf"))
    weight = tl.exp2(log_mass - tl.max(log_mass, 0))
    partial = tl.load(
        partial_ptr + at[:, None] * BLOCK_H + h[None, :], mask=used[:, None], other=0.0
    )
    out = tl.sum(partial * weight[:, None], 0) / tl.sum(weight, 0)
    out_at = (row.to(tl.int64) * N + head) * H + h
    tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=h < H)


@triton.jit
def _extend(
    q_ptr, k_ptr, v_ptr, table_ptr, table_stride, rows_ptr, rows_stride,
    out_ptr, scale, window, num_rows,
    Z: tl.constexpr, N: tl.constexpr, K: tl.constexpr, H: tl.constexpr, WINDOWED: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # Which row this tile belongs to: the first whose tiles, and those before, reach past it. The
    # heaviest tiles, at the end of the longest contexts, start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    b = tl.arange(0, BLOCK_B)
    tiles = tl.cdiv(tl.load(rows_ptr + 2 * rows_stride + b, mask=b < num_rows, other=0), BLOCK_M)
    before = tl.cumsum(tiles, 0) - tiles
    row = tl.sum(((before + tiles <= tile) & (b < num_rows)).to(tl.int32), 0)
    m_first = (tile - tl.sum(tl.where(b == row, before, 0), 0)) * BLOCK_M

    length = tl.load(rows_ptr + 2 * rows_stride + row)
    end = tl.load(rows_ptr + 3 * rows_stride + row)
    start = end - length
    q_first = tl.load(rows_ptr + rows_stride + row).to(tl.int64)
    table = table_ptr + tl.load(rows_ptr + row).to(tl.int64) * table_stride
    m = m_first + tl.arange(0, BLOCK_M)
    h = tl.arange(0, BLOCK_H)
    query = start + m
    q_at = ((q_first + m[:, None]) * N + head) * H + h[None, :]
    in_q = (m[:, None] < length) & (h[None, :] < H)
    q = tl.load(q_ptr + q_at, mask=in_q, other=0.0)
    top = tl.full([BLOCK_M], -1e30, tl.float32)  # finite: a window can hide a whole block
    mass = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_H], tl.float32)
    low = 0
    if WINDOWED:
        low = tl.maximum(start + m_first - window + 1, 0) // BLOCK_N * BLOCK_N
    high = tl.minimum(start + m_first + BLOCK_M, end)
    # Keys that every query of the tile sees need no mask.
    whole = low
    if not WINDOWED:
        whole = (start + m_first + 1) // BLOCK_N * BLOCK_N
    kv_head = head // (N // K)
    acc, mass, top = _attend(
        acc, mass, top, q, k_ptr, v_ptr, table, query, h, kv_head, scale, window, low, whole, end,
        False, Z, K, H, WINDOWED, BLOCK_N,
    )  # fmt: skip
    acc, mass, top = _attend(
        acc, mass, top, q, k_ptr, v_ptr, table, query, h, kv_head, scale, window, whole, high, end,
        True, Z, K, H, WINDOWED, BLOCK_N,
    )  # fmt: skip
    out = (acc / mass[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + q_at, out, mask=in_q)


@triton.jit
def _attend(
    acc, mass, top, q, k_ptr, v_ptr, table, query, h, kv_head, scale, window, first, last, end,
    MASKED: tl.constexpr, Z: tl.constexpr, K: tl.constexpr, H: tl.constexpr,
    WINDOWED: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    for start in range(first, last, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        inside = n < end
        page = tl.load(table + n // Z, mask=inside, other=0).to(tl.int64)
        at = ((page * Z + n % Z) * K + kv_head) * H
        k = tl.load(
            k_ptr + at[None, :] + h[:, None], mask=inside[None, :] & (h[:, None] < H), other=0.0
        )
        v = tl.load(
            v_ptr + at[:, None] + h[None, :], mask=inside[:, None] & (h[None, :] < H), other=0.0
        )
        score = tl.dot(q, k, input_precision="ieee") * scale
        if MASKED:
            seen = n[None, :] <= query[:, None]
            if WINDOWED:
                seen = seen & (n[None, :] > query[:, None] - window)
            score = tl.where(seen, score, -float("inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        p = tl.exp2(score - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        mass = mass * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        top = new_top
    return acc, mass, top
