"""Tensor parallelism: how heads, columns and vocabulary are split over the ranks.

The functions return the half-open interval of each rank as a `range`; all ranks compute the same
intervals. With N query heads and K key/value heads, query head n reads key/value head n // (N / K).
Attention kernels require that all key/value heads of a rank have the same number of the rank's
query heads.

With at most as many ranks as key/value heads, each rank holds whole groups (8 key/value heads with
2 query heads each, on 3 ranks)::

    KV heads      |== 0 1 2 ==|== 3 4 5 ===|== 6 7 ===|
    query heads   |== 0 .. 5 =|== 6 .. 11 =|= 12 .. 15|
    rank                0            1           2

With more ranks than key/value heads, each rank holds one key/value head, and some of the query
heads that read it. Other ranks may hold the same key/value head (2 key/value heads with 7 query
heads each, on 4 ranks). If the ranks do not divide evenly, the first key/value heads get one rank
more (on 3 ranks: 4, 3 and 7 query heads)::

    KV heads      |========== 0 ==========|=========== 1 ===========|
    query heads   |= 0 1 2 3 =|== 4 5 6 ==|= 7 8 9 10 =|= 11 12 13 =|
    rank                0           1            2            3
"""

from __future__ import annotations

from dataclasses import dataclass

from minisgl.errors import ConfigError
from minisgl.utils.text import counted

COLUMN_UNITS = (64, 32, 16, 8, 4, 2, 1)
"""Numbers of columns that stay together, best first. 64 columns of 16 bits are 128 bytes, the
multiple that NVIDIA's guide ("Matrix Multiplication Background") advises for a GEMM's sizes; 8 is
the least for speed."""
MOST_UNEVEN = 1 / 16
"""A larger unit is used if the largest share exceeds the mean by at most this fraction."""
VOCAB_UNIT = 16
"""The rows of a vocabulary share are a multiple of this: aligned as above, and small enough that
the vocabularies of Llama 3 and Qwen need no padding on up to 8 ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShare:
    """A rank's query heads and key/value heads."""

    q: range
    kv: range


def split(count: int, num_shares: int) -> list[range]:
    """Split [0, count) in order. The first shares are one larger if it does not divide evenly."""
    size, larger = divmod(count, num_shares)
    starts = [i * size + min(i, larger) for i in range(num_shares + 1)]
    return [range(starts[i], starts[i + 1]) for i in range(num_shares)]


def times(span: range, size: int) -> range:
    """Return the range of elements of the items in `span`, which have `size` elements each."""
    return range(span.start * size, span.stop * size)


def split_columns(width: int, num_ranks: int, block: int = 1) -> list[range]:
    """Split a layer's columns in the largest units with which the shares are about even.

    block: this many columns must stay together (a block of a quantised weight); the last block may
    be smaller. Raises ConfigError if a rank would have no columns.
    """
    num_blocks = -(-width // block)
    if num_blocks < num_ranks:
        in_blocks = f", in blocks of {block}," if block > 1 else ""
        raise ConfigError(
            f"a layer of width {width}{in_blocks} cannot be shared by "
            f"{counted(num_ranks, 'rank')}; use at most {num_blocks}"
        )
    for unit in COLUMN_UNITS:
        num_units, rest = divmod(width, unit)
        largest = -(-num_units // num_ranks) * unit
        even = largest * num_ranks <= (1 + MOST_UNEVEN) * width
        if not rest and unit % block == 0 and (unit == 1 or even):
            return [times(span, unit) for span in split(num_units, num_ranks)]
    blocks = split(num_blocks, num_ranks)
    return [range(span.start * block, min(span.stop * block, width)) for span in blocks]


def split_heads(num_q_heads: int, num_kv_heads: int, num_ranks: int) -> list[HeadShare]:
    """Split the heads as drawn above. num_q_heads must be a multiple of num_kv_heads.

    Raises ConfigError if a rank would have no query head.
    """
    if num_ranks > num_q_heads:
        raise ConfigError(
            f"{counted(num_q_heads, 'query head')} cannot be shared by {num_ranks} ranks, since "
            f"each needs one; use at most {counted(num_q_heads, 'rank')}"
        )
    group = num_q_heads // num_kv_heads
    if num_ranks <= num_kv_heads:
        return [HeadShare(q=times(kv, group), kv=kv) for kv in split(num_kv_heads, num_ranks)]
    return [
        HeadShare(q=range(head * group + q.start, head * group + q.stop), kv=range(head, head + 1))
        for head, ranks in enumerate(split(num_ranks, num_kv_heads))
        for q in split(group, len(ranks))
    ]


def vocab_rows(vocab_size: int, num_ranks: int) -> int:
    """Return the rows of each rank's vocabulary share. All are equal, so the last may be padded."""
    if num_ranks == 1:
        return vocab_size
    return -(-vocab_size // (num_ranks * VOCAB_UNIT)) * VOCAB_UNIT


def vocab_share(vocab_size: int, num_ranks: int, rank: int) -> range:
    """Return a rank's rows without padding. The last ranks may have fewer, or none."""
    rows = vocab_rows(vocab_size, num_ranks)
    return range(min(rank * rows, vocab_size), min((rank + 1) * rows, vocab_size))
