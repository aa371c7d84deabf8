"""How a step's contexts are cut into the pieces of decode attention::

    row 0   |== piece 0 ==|== piece 1 ==|== piece 2 =|     their keys are a multiple of BLOCK_N,
    row 1   |= piece 5 =|                                  at least MIN_PIECE
    row 2   |= piece 3 =|= piece 4 =|

There is room for as many pieces as the device runs at once, and one more for each row, since each
has at least one. A row has as many as its share of all tokens, so a long context among short ones
does not hold them up, and rows that pad take none of it; shares are rounded to the nearest number,
or all down where that ends earlier. The device starts pieces in order, so the largest come first
and small ones fill the end (LPT, Graham 1969); what is left over comes last. Which piece is whose
is found on the device, once a step (`cut_contexts`), as a captured launch serves every context.
Where rows are few, each has the same number of pieces, known at the launch.

Axes: as in `minisgl.kernel.triton.decode_attention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.decode_form import (
    FEW_BELOW,
    MAX_PIECES,
    DecodeForm,
    decode_form,
    few_pieces,
    pieces_at_once,
)
from minisgl.kernel.triton.attend import block_h_of
from minisgl.kernel.triton.launch import Launcher, wait

MIN_PIECE = 64
"""Tokens: below it the merge costs more than the parallelism gives."""
SHARED_PIECES = 16
"""Of a shared beginning: with 128 rows and 8 heads, 512 programs for 132 multiprocessors."""
CUT_ROWS = 256  # a turn of `_cut`
CLASSES = 8  # of the sizes of pieces
MOST_PIECES = tl.constexpr(MAX_PIECES)

# What the table of a `Cut` says of a piece; nobody's has no keys.
ROW, TABLE_IDX, FIRST, LAST, END, BASE, COUNT = (tl.constexpr(i) for i in range(7))
FIELDS = tl.constexpr(8)  # 32 bytes, one sector of memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How the contexts of a step are cut, and room for what the pieces give: for all layers with
    the same window, one after another.

    form: of the programs. pieces_each: of every context, where rows are few; else 0.
    table: int32 [S, FIELDS], of each piece its row, the row's index in the page table, first and
    last + 1 of its keys, the row's end, its first piece and their number. A row without keys of its
    own has none, and nothing is written for it. Where rows are few, anything: nobody reads it.
    done: int32 [>= B * K], zero between layers: how many of a row's pieces are done.
    partial: float32 [>= S, N, >= H], each piece's weighted mean of values. mass: float32 [>= S, N],
    log2 of its sum of exponentials. Behind the pieces', for each row, those of a shared beginning.
    """

    form: DecodeForm
    pieces_each: int
    num_pieces: int
    table: Tensor
    done: Tensor
    partial: Tensor
    mass: Tensor


def cut_contexts(
    rows: Tensor,
    q_shape: Sequence[int],
    dtype: torch.dtype,
    *,
    num_kv_heads: int,
    window: int | None,
    shared_1: Tensor | None,
    rotates: bool,
    num_cores: int,
    done_of_few: Tensor,
) -> Cut:
    """rows: `Batch.rows` [4, >= B]; of them table indices and ends are read. q_shape: (B, N, H).

    shared_1: int32 [1], tokens at the front of every context that lie in the same pages; only
    without a window. rotates: whether `decode` will be given a `Rotation`. num_cores: the device's
    multiprocessors. done_of_few: int32 [FEW_BELOW], zero between steps: `Cut.done` of few rows.
    """
    num_rows, num_q_heads, head_dim = q_shape
    block_h, pairs = block_h_of(head_dim), num_rows * num_kv_heads
    group = num_q_heads // num_kv_heads
    form = decode_form(pairs, num_cores, block_h, dtype)
    is_few = rotates and pairs < FEW_BELOW
    pieces_each = few_pieces(pairs, num_cores, form) if is_few else 0
    at_once = pieces_at_once(num_kv_heads, num_cores, form)
    num_pieces = num_rows * pieces_each if is_few else num_rows + at_once
    num_sums = num_pieces + (num_rows * SHARED_PIECES if shared_1 is not None else 0)
    int32: dict[str, Any] = {"dtype": torch.int32, "device": rows.device}
    float32: dict[str, Any] = {"dtype": torch.float32, "device": rows.device}
    cut = Cut(
        form=form,
        pieces_each=pieces_each,
        num_pieces=num_pieces,
        table=rows if is_few else torch.empty((num_pieces, FIELDS.value), **int32),
        done=done_of_few if is_few else torch.empty(pairs, **int32),
        partial=torch.empty((num_sums, num_q_heads, block_h), **float32),
        mass=torch.empty((num_sums, num_q_heads), **float32),
    )
    if not is_few:
        _launch_cut(
            (1, 1, 1),
            (
                rows, rows if shared_1 is None else shared_1, cut.table, cut.done, window or 0,
                rows.stride(0), num_rows, num_pieces, at_once, pairs,
            ),
            (
                bool(window), shared_1 is not None, CUT_ROWS, form.keys, group, MIN_PIECE, CLASSES,
            ),
            dtype=dtype, num_warps=4,
        )  # fmt: skip
    return cut


@triton.jit
def first_own(end, window, shared_ptr, WINDOWED: tl.constexpr, CASCADE: tl.constexpr):
    """First key that a row reads itself."""
    first = end * 0
    if WINDOWED:
        first = tl.maximum(end - window, 0)
    if CASCADE:
        first += tl.load(shared_ptr)
    return first


@triton.jit
def piece_size(
    num_keys, count, G: tl.constexpr, BLOCK_N: tl.constexpr, MIN_PIECE: tl.constexpr
):  # fmt: skip
    """Keys of each of at most `count` pieces: fewer, where merging them would take longer than
    reading one. Adding the sums that a piece has for one head takes about as long as reading a key,
    so pieces of s keys take s + G * num_keys / s, which is least where s * s = G * num_keys.

    That is compared, block by block, with no root taken: for kernels with one, ptxas has allotted
    168 registers instead of 212, and steps of one row took 1.5 % longer.
    """
    blocks = tl.cdiv(tl.maximum(tl.cdiv(num_keys, count), MIN_PIECE), BLOCK_N)
    least = 1
    # Where more were needed, MOST_PIECES are as large.
    for k in tl.static_range(1, (G * MOST_PIECES + BLOCK_N - 1) // BLOCK_N):
        least += ((k * BLOCK_N) * (k * BLOCK_N) < G * num_keys).to(tl.int32)
    return tl.maximum(blocks, least) * BLOCK_N


@triton.jit
def _keys(
    ends_ptr, row, num_rows, window, shared_ptr, WINDOWED: tl.constexpr, CASCADE: tl.constexpr
):  # fmt: skip
    """Of rows: the first key that each reads itself, how many, and its end."""
    end = tl.load(ends_ptr + row, mask=row < num_rows, other=0)
    low = first_own(end, window, shared_ptr, WINDOWED, CASCADE)
    return low, tl.maximum(end - low, 0), end


@triton.jit
def _share_size(
    own, total, at_once, nearest, G: tl.constexpr, BLOCK_N: tl.constexpr, MIN_PIECE: tl.constexpr
):  # fmt: skip
    """Keys of a piece of a row that has `own` of `total`. nearest: 1 or 0, its share of `at_once`
    pieces is rounded to the nearest number or down."""
    share = ((2 * own.to(tl.int64) * at_once + nearest * total) // (2 * total)).to(tl.int32)
    share = tl.minimum(tl.maximum(share, 1), MOST_PIECES)
    return piece_size(own, share, G, BLOCK_N, MIN_PIECE)


@triton.jit(
    do_not_specialize=["window", "rows_stride", "num_rows", "num_pieces", "at_once", "num_done"],
    do_not_specialize_on_alignment=["rows_ptr", "shared_ptr"],
)
def _cut(
    rows_ptr, shared_ptr, table_ptr, done_ptr, window, rows_stride, num_rows, num_pieces, at_once,
    num_done,
    WINDOWED: tl.constexpr, CASCADE: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr,
    G: tl.constexpr, MIN_PIECE: tl.constexpr, CLASSES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program. It lets no other start before it has ended, so `_decode` may read the table
    before it waits for the kernel before."""
    wait(PDL)
    i = tl.arange(0, BLOCK_B)
    ends_ptr = rows_ptr + 3 * rows_stride
    total = tl.zeros([], tl.int64)
    for start in range(0, num_rows, BLOCK_B):
        _, own, _ = _keys(ends_ptr, start + i, num_rows, window, shared_ptr, WINDOWED, CASCADE)
        total += tl.sum(own.to(tl.int64), 0)
    total = tl.maximum(total, 1)
    # Of shares rounded down the pieces run at once, and the largest ends last. Rounded to the
    # nearest it is smaller, but where more than run at once are at least half as large as that one,
    # two of them run one after the other, and end no earlier.
    largest = tl.zeros([], tl.int32)
    for start in range(0, num_rows, BLOCK_B):
        _, own, _ = _keys(ends_ptr, start + i, num_rows, window, shared_ptr, WINDOWED, CASCADE)
        size = _share_size(own, total, at_once, 0, G, BLOCK_N, MIN_PIECE)
        largest = tl.maximum(largest, tl.max(tl.minimum(own, size), 0))
    largest_nearest, num_large = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    for start in range(0, num_rows, BLOCK_B):
        _, own, _ = _keys(ends_ptr, start + i, num_rows, window, shared_ptr, WINDOWED, CASCADE)
        size = _share_size(own, total, at_once, 1, G, BLOCK_N, MIN_PIECE)
        piece = tl.minimum(own, size)
        largest_nearest = tl.maximum(largest_nearest, tl.max(piece, 0))
        num_large += tl.sum(tl.where(2 * piece >= largest, tl.cdiv(own, size), 0), 0)
    nearest = (num_large <= at_once).to(tl.int32)
    largest = tl.where(nearest > 0, largest_nearest, largest)
    used = tl.zeros([], tl.int32)
    for start in range(0, num_rows, BLOCK_B):
        row = start + i
        low, own, end = _keys(ends_ptr, row, num_rows, window, shared_ptr, WINDOWED, CASCADE)
        size = _share_size(own, total, at_once, nearest, G, BLOCK_N, MIN_PIECE)
        count = tl.cdiv(own, size)
        # Large ones first, by classes of their size.
        place = CLASSES - 1 - tl.minimum(own, size) * CLASSES // (largest + 1)
        is_of = tl.maximum(place, 0)[None, :] == tl.arange(0, CLASSES)[:, None]
        counts = tl.where(is_of, count[None, :], 0)
        of_classes = tl.sum(counts, 1)
        before = tl.cumsum(counts, 1) - counts + (tl.cumsum(of_classes, 0) - of_classes)[:, None]
        base = used + tl.sum(tl.where(is_of, before, 0), 0)
        used += tl.sum(of_classes, 0)
        table_idx = tl.load(rows_ptr + row, mask=row < num_rows, other=0)
        for j in range(tl.max(count, 0)):
            has = j < count
            at = table_ptr + (base + j) * FIELDS
            first = low + j * size
            tl.store(at + ROW, row, mask=has)
            tl.store(at + TABLE_IDX, table_idx, mask=has)
            tl.store(at + FIRST, first, mask=has)
            tl.store(at + LAST, tl.minimum(first + size, end), mask=has)
            tl.store(at + END, end, mask=has)
            tl.store(at + BASE, base, mask=has)
            tl.store(at + COUNT, count, mask=has)
    for start in range(used * FIELDS, num_pieces * FIELDS, BLOCK_B):
        tl.store(table_ptr + start + i, 0, mask=start + i < num_pieces * FIELDS)
    for start in range(0, num_done, BLOCK_B):
        tl.store(done_ptr + start + i, 0, mask=start + i < num_done)
    tl.debug_barrier()
    tl.atomic_add(done_ptr, 0, sem="release")  # what it wrote is seen by all that start from now on


_launch_cut = Launcher(_cut)
