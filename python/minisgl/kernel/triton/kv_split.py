"""KV splits: divides the contexts of a decode step among the programs of decode attention.

::

    row 0   |== split 0 ==|== split 1 ==|== split 2 =|     a split has a multiple of BLOCK_N keys,
    row 1   |= split 5 =|                                  at least MIN_SPLIT
    row 2   |= split 3 =|= split 4 =|

The table has room for the splits that the device runs at once, and for one more per row, because
each row has at least one. A row gets splits in proportion to its tokens, so a long context does not
hold up short ones, and padding rows get none. All shares are rounded to the nearest number, or all
are rounded down if the step then ends earlier. The device starts the splits in order: the largest
come first, and small ones fill the end (LPT, Graham 1969). Unused entries come last.

A captured launch serves every context, so the device itself makes the table, once per step
(`split_contexts`). In a step of few rows each row has the same number of splits, which is known at
the launch; then there is no table.

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

from minisgl.kernel.triton.attend import block_h_of
from minisgl.kernel.triton.decode_config import (
    FEW_BELOW,
    MAX_SPLITS,
    DecodeConfig,
    decode_config,
    few_splits,
    latent_config,
    num_groups,
    splits_at_once,
)
from minisgl.kernel.triton.launch import Launcher, is_hopper, wait

MIN_SPLIT = 64
"""Tokens. With smaller splits the merge costs more than the parallelism saves."""
PREFIX_SPLITS = 16
"""Splits of a common prefix. 128 rows and 8 heads then have 512 programs for 132
multiprocessors."""
SPLIT_ROWS = 256  # rows that `_split` reads at once
CLASSES = 8  # of sizes, by which splits are sorted
MOST_SPLITS = tl.constexpr(MAX_SPLITS)

# The fields of an entry of `KVSplits.table`. An unused entry has no keys.
ROW, TABLE_IDX, FIRST, LAST, END, BASE, COUNT = (tl.constexpr(i) for i in range(7))
FIELDS = tl.constexpr(8)  # 32 bytes, one sector of memory


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSplits:
    """The splits of a step, and memory for their results. All layers with the same window use it,
    one after another.

    config: of the programs. num_groups: of query heads, each with its own programs: K, or the
    parts of the heads that attend to latents. splits_each: splits per context in a step of few
    rows, else 0.
    table: int32 [S, FIELDS]. For each split: its row, the row's index in the page table, its first
    key and its last key + 1, the row's end, the row's first split and their number. A row that has
    no keys of its own has no split, and nothing is written for it. Not read in a step of few rows.
    done: int32 [>= B * K], how many splits of a row have ended. Zero between layers.
    partial: float32 [>= S, N, >= V], the weighted mean of the values of each split. mass: float32
    [>= S, N], log2 of its sum of exponentials. Those of the splits of a common prefix follow, row
    by row.
    """

    config: DecodeConfig
    num_groups: int
    splits_each: int
    num_splits: int
    table: Tensor
    done: Tensor
    partial: Tensor
    mass: Tensor


def split_contexts(
    rows: Tensor,
    q_shape: Sequence[int],
    dtype: torch.dtype,
    *,
    kv_dtype: torch.dtype,
    num_kv_heads: int,
    value_dim: int,
    window: int | None,
    common_prefix: Tensor | None,
    rotates: bool,
    num_cores: int,
    done_of_few: Tensor,
) -> KVSplits:
    """Divide the contexts of the decode rows into splits.

    rows: `PoolBatch.rows` [4, >= B]; table indices and ends are read. q_shape: (B, N, H). dtype,
    kv_dtype: of queries and of the cache. value_dim: V. common_prefix: int32 [1], the
    number of tokens that all contexts have in the same pages; None with a window. rotates: whether
    `decode` gets a `Rotation`. num_cores: multiprocessors of the device. done_of_few: int32
    [FEW_BELOW], zero between steps: `KVSplits.done` in a step of few rows.
    """
    num_rows, num_q_heads, head_dim = q_shape
    block_h, is_few = block_h_of(value_dim), rotates and num_rows * num_kv_heads < FEW_BELOW
    if value_dim < head_dim:
        config = latent_config(num_rows, num_q_heads, dtype, is_hopper=is_hopper())
        num_kv_heads = num_groups(num_q_heads, config)
    else:
        pairs = num_rows * num_kv_heads
        config = decode_config(pairs, num_cores, block_h, dtype, kv_dtype, is_few=is_few)
    pairs, group = num_rows * num_kv_heads, num_q_heads // num_kv_heads
    splits_each = few_splits(pairs, num_cores, config) if is_few else 0
    at_once = splits_at_once(num_kv_heads, num_cores, config)
    num_splits = num_rows * splits_each if is_few else num_rows + at_once
    num_sums = num_splits + (num_rows * PREFIX_SPLITS if common_prefix is not None else 0)
    int32: dict[str, Any] = {"dtype": torch.int32, "device": rows.device}
    float32: dict[str, Any] = {"dtype": torch.float32, "device": rows.device}
    splits = KVSplits(
        config=config,
        num_groups=num_kv_heads,
        splits_each=splits_each,
        num_splits=num_splits,
        table=rows if is_few else torch.empty((num_splits, FIELDS.value), **int32),
        done=done_of_few if is_few else torch.empty(pairs, **int32),
        partial=torch.empty((num_sums, num_q_heads, block_h), **float32),
        mass=torch.empty((num_sums, num_q_heads), **float32),
    )
    if not is_few:
        _launch_split(
            (1, 1, 1),
            (
                rows, rows if common_prefix is None else common_prefix, splits.table, splits.done,
                window or 0, rows.stride(0), num_rows, num_splits, at_once, pairs,
            ),
            (
                bool(window), common_prefix is not None, SPLIT_ROWS, config.keys, group, MIN_SPLIT,
                CLASSES,
            ),
            dtype=dtype, num_warps=4,
        )  # fmt: skip
    return splits


@triton.jit
def first_own(end, window, prefix_ptr, WINDOWED: tl.constexpr, CASCADE: tl.constexpr):
    """Return the first key of the row's own splits."""
    first = end * 0
    if WINDOWED:
        first = tl.maximum(end - window, 0)
    if CASCADE:
        first += tl.load(prefix_ptr)
    return first


@triton.jit
def split_size(
    num_keys, count, G: tl.constexpr, BLOCK_N: tl.constexpr, MIN_SPLIT: tl.constexpr
):  # fmt: skip
    """Return the keys of each split of a row that may have `count` splits.

    There are fewer splits if merging them would take longer than reading one. To add the partial
    sums of a split for one head takes about as long as to read a key. Splits of s keys therefore
    take s + G * num_keys / s, which is least if s * s = G * num_keys.

    The kernel compares squares, block by block, instead of taking a root: with a root ptxas
    allotted 168 registers instead of 212, and steps of one row took 1.5 % longer.
    """
    blocks = tl.cdiv(tl.maximum(tl.cdiv(num_keys, count), MIN_SPLIT), BLOCK_N)
    least = 1
    # A row that needs more than MOST_SPLITS has this many larger ones.
    for k in tl.static_range(1, (G * MOST_SPLITS + BLOCK_N - 1) // BLOCK_N):
        least += ((k * BLOCK_N) * (k * BLOCK_N) < G * num_keys).to(tl.int32)
    return tl.maximum(blocks, least) * BLOCK_N


@triton.jit
def _keys(
    ends_ptr, row, num_rows, window, prefix_ptr, WINDOWED: tl.constexpr, CASCADE: tl.constexpr
):  # fmt: skip
    """Return each row's first own key, the number of its own keys, and its end."""
    end = tl.load(ends_ptr + row, mask=row < num_rows, other=0)
    low = first_own(end, window, prefix_ptr, WINDOWED, CASCADE)
    return low, tl.maximum(end - low, 0), end


@triton.jit
def _share_size(
    own, total, at_once, nearest, G: tl.constexpr, BLOCK_N: tl.constexpr, MIN_SPLIT: tl.constexpr
):  # fmt: skip
    """Return the keys of each split of a row that has `own` of `total` keys.

    nearest: whether its share of the `at_once` splits is rounded to the nearest number (1) or down
    (0).
    """
    share = ((2 * own.to(tl.int64) * at_once + nearest * total) // (2 * total)).to(tl.int32)
    share = tl.minimum(tl.maximum(share, 1), MOST_SPLITS)
    return split_size(own, share, G, BLOCK_N, MIN_SPLIT)


@triton.jit(
    do_not_specialize=["window", "rows_stride", "num_rows", "num_splits", "at_once", "num_done"],
    do_not_specialize_on_alignment=["rows_ptr", "prefix_ptr"],
)
def _split(
    rows_ptr, prefix_ptr, table_ptr, done_ptr, window, rows_stride, num_rows, num_splits, at_once,
    num_done,
    WINDOWED: tl.constexpr, CASCADE: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr,
    G: tl.constexpr, MIN_SPLIT: tl.constexpr, CLASSES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write the table, in one program. It ends before any later kernel starts, so `_decode` may
    read the table before it waits for the kernel before."""
    wait(PDL)
    i = tl.arange(0, BLOCK_B)
    ends_ptr = rows_ptr + 3 * rows_stride
    total = tl.zeros([], tl.int64)
    for start in range(0, num_rows, BLOCK_B):
        _, own, _ = _keys(ends_ptr, start + i, num_rows, window, prefix_ptr, WINDOWED, CASCADE)
        total += tl.sum(own.to(tl.int64), 0)
    total = tl.maximum(total, 1)
    # If all shares are rounded down, all splits run at once, and the largest ends last. If they are
    # rounded to the nearest number, the largest is smaller. But if more splits than run at once are
    # at least half as large as it, two of them run one after the other, and the step ends no
    # earlier.
    largest = tl.zeros([], tl.int32)
    for start in range(0, num_rows, BLOCK_B):
        _, own, _ = _keys(ends_ptr, start + i, num_rows, window, prefix_ptr, WINDOWED, CASCADE)
        size = _share_size(own, total, at_once, 0, G, BLOCK_N, MIN_SPLIT)
        largest = tl.maximum(largest, tl.max(tl.minimum(own, size), 0))
    largest_nearest, num_large = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    for start in range(0, num_rows, BLOCK_B):
        _, own, _ = _keys(ends_ptr, start + i, num_rows, window, prefix_ptr, WINDOWED, CASCADE)
        size = _share_size(own, total, at_once, 1, G, BLOCK_N, MIN_SPLIT)
        split = tl.minimum(own, size)
        largest_nearest = tl.maximum(largest_nearest, tl.max(split, 0))
        num_large += tl.sum(tl.where(2 * split >= largest, tl.cdiv(own, size), 0), 0)
    nearest = (num_large <= at_once).to(tl.int32)
    largest = tl.where(nearest > 0, largest_nearest, largest)
    used = tl.zeros([], tl.int32)
    for start in range(0, num_rows, BLOCK_B):
        row = start + i
        low, own, end = _keys(ends_ptr, row, num_rows, window, prefix_ptr, WINDOWED, CASCADE)
        size = _share_size(own, total, at_once, nearest, G, BLOCK_N, MIN_SPLIT)
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
    for start in range(used * FIELDS, num_splits * FIELDS, BLOCK_B):
        tl.store(table_ptr + start + i, 0, mask=start + i < num_splits * FIELDS)
    for start in range(0, num_done, BLOCK_B):
        tl.store(done_ptr + start + i, 0, mask=start + i < num_done)
    tl.debug_barrier()
    tl.atomic_add(done_ptr, 0, sem="release")  # what it wrote is seen by all that start from now on


_launch_split = Launcher(_split)
