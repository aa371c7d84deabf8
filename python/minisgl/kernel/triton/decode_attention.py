"""Attention of decode rows over the paged cache: split-KV flash-decode.

Keys and values are read where they lie (`minisgl.kernel.triton.attend`). Each row's context is cut
into pieces that run side by side, and their partial sums are merged (Flash-Decoding, Dao et al.
2023)::

    context of a row   |== piece 0 ==|== piece 1 ==|== piece 2 =|       a piece is a multiple of
                       0             piece         2 * piece    end     BLOCK_N, at least MIN_PIECE

How many pieces there are at most depends only on the number of rows, so a captured launch serves
every context length: as many as the device runs at once.

Rows whose contexts begin with the same pages read those once for all of them (cascade attention:
Ye et al. 2024; Hydragen: Juravsky et al. 2024): `_decode_shared` takes many rows' queries as one
block, and its pieces are merged with those of the rows' own contexts::

    context of a row   |======= shared =======|== own piece 0 ==|== own piece 1 ==|
                       0                      shared                              end

Axes: B rows, N query heads, K key/value heads, G query heads per key/value head, H head
dim, P pages of a table row, S pieces.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.decode_form import LIGHT, SHARED_PIECES, decode_form, slot_constants
from minisgl.kernel.sizes import power_of_2
from minisgl.kernel.triton.attend import ENDED, LOG2_E, attend
from minisgl.kernel.triton.launch import Launcher, begin, fetch_lines, has_pdl

MIN_PIECE = 64
"""Tokens: below it the merge costs more than the parallelism gives."""
MERGED = tl.constexpr(4)  # slots a turn of a merge


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """Lets `decode` take q, k and v as they are projected: what `norm_rope_store` does is done
    where they are used. For heads whose dims, a power of two, all rotate.

    qkv: [B, (N + 2K) * H], contiguous. slots: int32 [B]. cos_sin: float32 [P, H]. Weights of the
    norms [H], or None.
    """

    qkv: Tensor
    slots: Tensor
    cos_sin: Tensor
    q_weight: Tensor | None
    k_weight: Tensor | None
    eps: float


def decode(
    q_BNH: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    page_table: Tensor,
    rows: Tensor,
    *,
    scale: float,
    window: int | None,
    shared_1: Tensor | None,
    num_cores: int,
    done: Tensor,
    rotation: Rotation | None = None,
    out_BNH: Tensor,
) -> None:
    """One query per row. rows: `Batch.rows` [4, >= B]; only table indices and ends are read.

    shared_1: int32 [1], tokens at the front of every context that lie in the same pages; only
    without a window. num_cores: the device's multiprocessors. done: int32 [`num_counters`], zero
    between calls: how many pieces are done.
    rotation: then q_BNH has a shape and a dtype alone; not with shared_1.
    """
    num_rows, num_q_heads, head_dim = q_BNH.shape
    page_size, num_kv_heads = k_pool.shape[1:3]
    group = num_q_heads // num_kv_heads
    block_h = max(power_of_2(head_dim), 16)
    pairs = num_rows * num_kv_heads
    form, pieces = decode_form(pairs, num_cores, block_h, q_BNH.dtype)
    block_n = form.keys
    cascade = shared_1 is not None
    slots = pieces + (SHARED_PIECES if cascade else 0)
    fixed, block_s = slot_constants(pairs, pieces, cascade, rotation is not None)
    partial = mass = q_BNH
    if slots > 1:
        shape = (num_rows, num_q_heads, slots)
        partial = torch.empty((*shape, block_h), dtype=torch.float32, device=q_BNH.device)
        mass = torch.empty(shape, dtype=torch.float32, device=q_BNH.device)
    shared = rows if shared_1 is None else shared_1
    common = (page_table.stride(0), page_size, num_kv_heads, group, head_dim)
    if cascade:
        block_m = 64
        blocks = -(-num_rows * group // block_m)
        _launch_decode_shared(
            (blocks, num_kv_heads, SHARED_PIECES),
            (
                q_BNH, k_pool, v_pool, page_table, rows, shared, partial, mass,
                scale * LOG2_E, num_rows, pieces,
            ),
            (*common, SHARED_PIECES, block_m, block_h, block_n),
            dtype=q_BNH.dtype, num_warps=4, num_stages=min(form.stages, 3),
        )  # fmt: skip
    fused: tuple[Any, ...] = (q_BNH, rows, q_BNH, q_BNH, q_BNH, 0.0)
    normed = False
    if rotation is not None:
        normed = rotation.q_weight is not None
        weights = (rotation.q_weight, rotation.k_weight) if normed else (q_BNH, q_BNH)
        fused = (rotation.qkv, rotation.slots, rotation.cos_sin, *weights, rotation.eps)
    _launch_decode(
        (num_rows, num_kv_heads, pieces),
        (
            q_BNH, k_pool, v_pool, page_table, rows, shared, out_BNH, partial, mass, done,
            *fused, scale * LOG2_E, window or 0, rows.stride(0),
        ),
        (
            *common, fixed, block_s, SHARED_PIECES, bool(window), cascade,
            max(power_of_2(group), 16), block_h, block_n, MIN_PIECE, rotation is not None, normed,
            form == LIGHT and fixed > 0 and has_pdl(),
        ),
        dtype=q_BNH.dtype, num_warps=form.warps, num_stages=form.stages,
    )  # fmt: skip
    if cascade:
        _launch_merge(
            (num_rows, num_q_heads, 1),
            (partial, mass, rows, shared, out_BNH, window or 0, pieces, rows.stride(0)),
            (
                num_q_heads, head_dim, block_s,
                SHARED_PIECES, bool(window), block_h, block_n, MIN_PIECE,
            ),
            dtype=q_BNH.dtype, num_warps=2,
        )  # fmt: skip


@triton.jit
def _own_pieces(
    end, window, shared_ptr, pieces, WINDOWED: tl.constexpr, CASCADE: tl.constexpr,
    BLOCK_N: tl.constexpr, MIN_PIECE: tl.constexpr,
):  # fmt: skip
    """(first key that the row reads itself, tokens a piece) of a decode row."""
    low = 0
    if WINDOWED:
        low = tl.maximum(end - window, 0)
    if CASCADE:
        low = tl.load(shared_ptr)
    piece = tl.cdiv(tl.cdiv(end - low, pieces), BLOCK_N) * BLOCK_N
    return low, tl.maximum(piece, MIN_PIECE)


@triton.jit
def _shared_piece(shared, PIECES: tl.constexpr, BLOCK_N: tl.constexpr):
    return tl.maximum(tl.cdiv(tl.cdiv(shared, PIECES), BLOCK_N) * BLOCK_N, BLOCK_N)


@triton.jit(
    do_not_specialize=["window", "rows_stride"],
    do_not_specialize_on_alignment=["rows_ptr", "shared_ptr", "slots_ptr"],
)
def _decode(
    q_ptr, k_ptr, v_ptr, table_ptr, rows_ptr, shared_ptr, out_ptr, partial_ptr, mass_ptr,
    done_ptr, qkv_ptr, slots_ptr, cos_sin_ptr, q_weight_ptr, k_weight_ptr, eps,
    scale, window, rows_stride,
    TABLE_STRIDE: tl.constexpr,
    Z: tl.constexpr, K: tl.constexpr, G: tl.constexpr, H: tl.constexpr,
    PIECES: tl.constexpr, BLOCK_S: tl.constexpr, SHARED_PIECES: tl.constexpr,
    WINDOWED: tl.constexpr, CASCADE: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
    MIN_PIECE: tl.constexpr, ROTATE: tl.constexpr, NORM: tl.constexpr,
    EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, kv_head, index = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if PIECES > 0:  # fewer registers, as the number is known when it is compiled
        pieces: tl.constexpr = PIECES
        slots: tl.constexpr = PIECES  # what rotates has no shared beginning
    else:
        pieces = tl.num_programs(2)
        slots = pieces + SHARED_PIECES if CASCADE else pieces
    # The rows were uploaded before the step's first kernel: no need to wait for the one before.
    end = tl.load(rows_ptr + 3 * rows_stride + row)
    low, piece = _own_pieces(end, window, shared_ptr, pieces, WINDOWED, CASCADE, BLOCK_N, MIN_PIECE)
    first = low + index * piece
    last = tl.minimum(first + piece, end)
    if first < last:
        table = table_ptr + tl.load(rows_ptr + row).to(tl.int64) * TABLE_STRIDE
        g = tl.arange(0, BLOCK_G)
        h = tl.arange(0, BLOCK_H)
        head = kv_head * G + g
        if ROTATE:
            cos, sin = _turn(cos_sin_ptr + (end - 1) * H, H)
            if NORM:
                q_weight, k_weight = _pair(q_weight_ptr, H), _pair(k_weight_ptr, H)
            else:
                q_weight, k_weight = (cos, cos), (cos, cos)
            if EARLY:
                LINES: tl.constexpr = (H * k_ptr.dtype.element_ty.primitive_bitwidth + 1023) // 1024
                n = first + tl.arange(0, BLOCK_N)
                near = n < last
                page = tl.load(table + n // Z, mask=near, other=0).to(tl.int64)
                at = ((page * Z + n % Z) * K + kv_head) * H
                line = at[:, None] + (tl.arange(0, LINES) * (H // LINES))[None, :]
                near = tl.broadcast_to(near[:, None], [BLOCK_N, LINES])
                fetch_lines(k_ptr + line, near)
                fetch_lines(v_ptr + line, near)
        begin(PDL)
        q_at = (row.to(tl.int64) * K * G + head[:, None]) * H + h[None, :]
        in_q = (g[:, None] < G) & (h[None, :] < H)
        if ROTATE:
            base = qkv_ptr + row.to(tl.int64) * (K * G + 2 * K) * H
            q = _rotated(base + head[:, None] * H, g[:, None] < G, cos, sin, q_weight, eps, H, NORM)
            slot = tl.load(slots_ptr + row).to(tl.int64)
            if (last == end) & (slot >= 0):
                one = tl.arange(0, 1)[:, None]
                k_new = _rotated(
                    base + (K * G + kv_head + one) * H, one < 1, cos, sin, k_weight, eps, H, NORM
                )
                v_new = tl.load(base + (K * G + K + kv_head) * H + h)
                at_new = (slot * K + kv_head) * H
                tl.store(k_ptr + at_new + one * H + h[None, :], k_new)
                tl.store(v_ptr + at_new + h, v_new)
                tl.debug_barrier()  # this program reads them back
        else:
            q = tl.load(q_ptr + q_at, mask=in_q, other=0.0)
        top = tl.full([BLOCK_G], -1e30, tl.float32)
        mass = tl.zeros([BLOCK_G], tl.float32)
        acc = tl.zeros([BLOCK_G, BLOCK_H], tl.float32)
        query = tl.zeros([BLOCK_G], tl.int32)
        acc, mass, top = attend(
            acc, mass, top, q, k_ptr, v_ptr, table, query, h, kv_head, scale, window, first, last,
            last, ENDED, Z, K, H, False, BLOCK_N,
        )  # fmt: skip
        if BLOCK_S == 1:
            out = (acc / mass[:, None]).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + q_at, out, mask=in_q)
        else:
            at_S = ((row.to(tl.int64) * K * G + head) * slots) + index
            tl.store(
                partial_ptr + at_S[:, None] * BLOCK_H + h[None, :], acc / mass[:, None],
                mask=g[:, None] < G,
            )  # fmt: skip
            tl.store(mass_ptr + at_S, top + tl.log2(mass), mask=g < G)
            if not CASCADE:
                # The piece that is done last merges all: the others' sums are visible to it.
                count = tl.cdiv(end - low, piece)
                tl.debug_barrier()
                before = tl.atomic_add(done_ptr + row * K + kv_head, 1, sem="acq_rel")
                if before == count - 1:
                    tl.store(done_ptr + row * K + kv_head, 0)
                    tl.debug_barrier()
                    out = _merged(
                        partial_ptr, mass_ptr, row.to(tl.int64) * K * G + head, g < G, h, count,
                        slots, BLOCK_S, BLOCK_H,
                    )  # fmt: skip
                    tl.store(out_ptr + q_at, out.to(out_ptr.dtype.element_ty), mask=in_q)
    elif index == 0:
        begin(PDL)  # a grid that waits for nothing would let the one after it start too early


@triton.jit
def _merged(
    partial_ptr, mass_ptr, head_at, in_g, h, count, slots, BLOCK_S: tl.constexpr,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Outputs [heads, H] from the sums of the first `count` slots, several of them at a time."""
    s = tl.arange(0, BLOCK_S)
    log_mass = tl.load(
        mass_ptr + head_at[:, None] * slots + s[None, :],
        mask=in_g[:, None] & (s < count)[None, :], other=-float("inf"),
    )  # fmt: skip
    top = tl.where(in_g, tl.max(log_mass, 1), 0.0)
    mass = tl.sum(tl.exp2(log_mass - top[:, None]), 1)
    acc = tl.zeros([head_at.shape[0], BLOCK_H], tl.float32)
    for start in range(0, count, MERGED):
        for j in tl.static_range(MERGED):
            there = in_g & (start + j < count)
            at = head_at * slots + start + j
            weight = tl.exp2(tl.load(mass_ptr + at, mask=there, other=-float("inf")) - top)
            partial = tl.load(
                partial_ptr + at[:, None] * BLOCK_H + h[None, :], mask=there[:, None], other=0.0
            )
            acc += partial * weight[:, None]
    return acc / mass[:, None]


@triton.jit
def _pair(ptr, H: tl.constexpr):
    """Elements [1, H] at ptr, and those that they rotate with."""
    h = tl.arange(0, H)[None, :]
    return tl.load(ptr + h), tl.load(ptr + (h + H // 2) % H)


@triton.jit
def _turn(cos_sin_ptr, H: tl.constexpr):
    """Cosines and sines [1, H] of one position."""
    h = tl.arange(0, H)[None, :] % (H // 2)
    return tl.load(cos_sin_ptr + h), tl.load(cos_sin_ptr + H // 2 + h)


@triton.jit
def _rotated(
    row_ptr, inside, cos, sin, weight, eps, H: tl.constexpr, NORM: tl.constexpr
):  # fmt: skip
    """Heads [X, H] at row_ptr [X, 1], normed and rotated, as `norm_rope_store` rounds them."""
    h = tl.arange(0, H)[None, :]
    partner = (h + H // 2) % H
    x = tl.load(row_ptr + h, mask=inside, other=0.0)
    y = tl.load(row_ptr + partner, mask=inside, other=0.0)
    dtype = x.dtype
    if NORM:
        x32, y32 = x.to(tl.float32), y.to(tl.float32)
        scale = tl.rsqrt(tl.sum(x32 * x32, 1)[:, None] / H + eps)
        x = weight[0] * (x32 * scale).to(dtype)
        y = weight[1] * (y32 * scale).to(dtype)
    cos, sin = cos.to(dtype), sin.to(dtype)
    crossed = (y * sin).to(dtype)
    return (x * cos).to(dtype) + tl.where(h < H // 2, -crossed, crossed)


@triton.jit
def _merge_head(
    partial_ptr, mass_ptr, out_ptr, head_at, used, slots, H: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """From the sums of the slots in `used` to the output of one row's head."""
    at = head_at * slots + tl.arange(0, BLOCK_S)
    h = tl.arange(0, BLOCK_H)
    log_mass = tl.load(mass_ptr + at, mask=used, other=-float("inf"))
    weight = tl.exp2(log_mass - tl.max(log_mass, 0))
    partial = tl.load(
        partial_ptr + at[:, None] * BLOCK_H + h[None, :], mask=used[:, None], other=0.0
    )
    out = tl.sum(partial * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out_ptr + head_at * H + h, out.to(out_ptr.dtype.element_ty), mask=h < H)


@triton.jit(
    do_not_specialize=["num_rows", "pieces"],
    do_not_specialize_on_alignment=["rows_ptr", "shared_ptr"],
)
def _decode_shared(
    q_ptr, k_ptr, v_ptr, table_ptr, rows_ptr, shared_ptr, partial_ptr, mass_ptr,
    scale, num_rows, pieces,
    TABLE_STRIDE: tl.constexpr,
    Z: tl.constexpr, K: tl.constexpr, G: tl.constexpr, H: tl.constexpr,
    SHARED_PIECES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    block, kv_head, index = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin(PDL)
    shared = tl.load(shared_ptr)
    piece = _shared_piece(shared, SHARED_PIECES, BLOCK_N)
    first = index * piece
    last = tl.minimum(first + piece, shared)
    if first < last:
        # The first row's pages serve for all.
        table = table_ptr + tl.load(rows_ptr).to(tl.int64) * TABLE_STRIDE
        m = block * BLOCK_M + tl.arange(0, BLOCK_M)
        h = tl.arange(0, BLOCK_H)
        inside = m < num_rows * G
        head_at = (m // G).to(tl.int64) * K * G + kv_head * G + m % G
        q = tl.load(
            q_ptr + head_at[:, None] * H + h[None, :],
            mask=inside[:, None] & (h[None, :] < H), other=0.0,
        )  # fmt: skip
        top = tl.full([BLOCK_M], -1e30, tl.float32)
        mass = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_H], tl.float32)
        acc, mass, top = attend(
            acc, mass, top, q, k_ptr, v_ptr, table, m, h, kv_head, scale, 0, first, last,
            last, ENDED, Z, K, H, False, BLOCK_N,
        )  # fmt: skip
        at_S = head_at * (pieces + SHARED_PIECES) + pieces + index
        tl.store(
            partial_ptr + at_S[:, None] * BLOCK_H + h[None, :], acc / mass[:, None],
            mask=inside[:, None],
        )  # fmt: skip
        tl.store(mass_ptr + at_S, top + tl.log2(mass), mask=inside)


@triton.jit(
    do_not_specialize=["window", "pieces", "rows_stride"],
    do_not_specialize_on_alignment=["rows_ptr", "shared_ptr"],
)
def _merge(
    partial_ptr, mass_ptr, rows_ptr, shared_ptr, out_ptr, window, pieces, rows_stride,
    N: tl.constexpr, H: tl.constexpr, BLOCK_S: tl.constexpr,
    SHARED_PIECES: tl.constexpr, WINDOWED: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, MIN_PIECE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    begin(PDL)
    end = tl.load(rows_ptr + 3 * rows_stride + row)
    low, piece = _own_pieces(end, window, shared_ptr, pieces, WINDOWED, True, BLOCK_N, MIN_PIECE)
    s = tl.arange(0, BLOCK_S)
    count = tl.cdiv(low, _shared_piece(low, SHARED_PIECES, BLOCK_N))
    used = (s < pieces) & (s < tl.cdiv(end - low, piece))
    used = used | ((s >= pieces) & (s < pieces + count))
    head_at = row.to(tl.int64) * N + head
    slots = pieces + SHARED_PIECES
    _merge_head(partial_ptr, mass_ptr, out_ptr, head_at, used, slots, H, BLOCK_S, BLOCK_H)


_launch_decode = Launcher(_decode)
_launch_decode_shared = Launcher(_decode_shared)
_launch_merge = Launcher(_merge)
