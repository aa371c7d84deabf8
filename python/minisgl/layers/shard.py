"""Who holds what: heads, columns and vocabulary, shared by the ranks of a tensor-parallel group.

Plain arithmetic, the same on every rank: each function gives the half-open interval of every rank,
as a `range`. Heads are shared so that a rank's query heads are regular over its key/value heads,
which attention kernels rely on: of N local query heads over K, head n reads head n // (N / K).

No more ranks than key/value heads: whole groups, query heads follow (8 heads of 2 on 3 ranks)::

    KV heads      |== 0 1 2 ==|== 3 4 5 ===|== 6 7 ===|
    query heads   |== 0 .. 5 =|== 6 .. 11 =|= 12 .. 15|
    rank                0            1           2

More ranks: each holds one key/value head, which its neighbours have too, and a share of the query
heads that read it (2 heads of 7 on 4 ranks). Where the heads do not divide the ranks, the first
ones have a rank more (on 3 ranks: 4, 3 and 7 query heads)::

    KV heads      |========== 0 ==========|=========== 1 ===========|
    query heads   |= 0 1 2 3 =|== 4 5 6 ==|= 7 8 9 10 =|= 11 12 13 =|
    rank                0           1            2            3
"""

from __future__ import annotations

from dataclasses import dataclass

from minisgl.errors import ConfigError
from minisgl.utils.text import counted

COLUMN_UNITS = (64, 32, 16, 8, 4, 2, 1)
"""Columns that stay together, at best. 64 of 16 bits are the 128 bytes to which NVIDIA's guide
("Matrix Multiplication Background") wants a product's sizes rounded; 8 are the least for speed."""
MOST_UNEVEN = 1 / 16
"""How much larger than the mean the largest share may be for the sake of a larger unit."""
VOCAB_UNIT = 16
"""Rows of a vocabulary share: aligned as above, and small enough that the vocabularies of Llama 3
and Qwen need no padding on up to 8 ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShare:
    """A rank's query heads and key/value heads."""

    q: range
    kv: range


def split(count: int, num_shares: int) -> list[range]:
    """[0, count) in order, the first shares one larger where it does not divide."""
    size, larger = divmod(count, num_shares)
    starts = [i * size + min(i, larger) for i in range(num_shares + 1)]
    return [range(starts[i], starts[i + 1]) for i in range(num_shares)]


def times(span: range, size: int) -> range:
    """The elements of things of `size` elements each."""
    return range(span.start * size, span.stop * size)


def split_columns(width: int, num_ranks: int, block: int = 1) -> list[range]:
    """A layer's columns, in the largest units that keep the shares about even.

    block: columns that must stay together (a block of a quantised weight); the last block may be
    smaller. Raises ConfigError where a rank would have no columns.
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
    """See above; the number of query heads is a multiple of that of key/value heads.

    Raises ConfigError where a rank would have no query head.
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
    """Rows of each rank's share of a vocabulary: equal ones, so the last may be padded."""
    if num_ranks == 1:
        return vocab_size
    return -(-vocab_size // (num_ranks * VOCAB_UNIT)) * VOCAB_UNIT


def vocab_share(vocab_size: int, num_ranks: int, rank: int) -> range:
    """A rank's rows, without padding: the last ranks may have fewer, or none."""
    rows = vocab_rows(vocab_size, num_ranks)
    return range(min(rank * rows, vocab_size), min((rank + 1) * rows, vocab_size))
