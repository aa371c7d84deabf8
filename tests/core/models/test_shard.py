"""The arithmetic of shares, exhaustively over small numbers."""

from __future__ import annotations

import itertools

import pytest

from minisgl.errors import ConfigError
from minisgl.layers.shard import split, split_columns, split_heads, vocab_rows

RANKS = range(1, 10)


def joined(shares: list[range]) -> list[int]:
    return [i for share in shares for i in share]


def sizes(shares: list[range]) -> list[int]:
    return [len(share) for share in shares]


def test_split_covers_everything_once_and_evenly() -> None:
    for count, ranks in itertools.product(range(40), RANKS):
        shares = split(count, ranks)
        assert joined(shares) == list(range(count))
        assert len(shares) == ranks
        assert max(sizes(shares)) - min(sizes(shares)) <= 1


def test_heads_cover_everything_and_groups_stay_regular() -> None:
    for num_kv, group, ranks in itertools.product(range(1, 10), range(1, 9), RANKS):
        if ranks > num_kv * group:
            continue
        shares = split_heads(num_kv * group, num_kv, ranks)
        assert len(shares) == ranks
        assert joined([share.q for share in shares]) == list(range(num_kv * group))
        kv = joined([share.kv for share in shares])
        assert kv == sorted(kv)
        assert set(kv) == set(range(num_kv))
        if ranks <= num_kv:
            assert len(kv) == num_kv
        for share in shares:
            assert len(share.q) > 0
            local_group, rest = divmod(len(share.q), len(share.kv))
            assert not rest
            for n, head in enumerate(share.q):
                assert head // group == share.kv[n // local_group]
        # Even within one unit: a group, or a head among the ranks that hold the same group.
        if ranks <= num_kv:
            local = sizes([share.kv for share in shares])
            assert max(local) - min(local) <= 1
        else:
            holders = [[len(s.q) for s in shares if s.kv[0] == head] for head in range(num_kv)]
            assert all(max(local) - min(local) <= 1 for local in holders)
            assert max(map(len, holders)) - min(map(len, holders)) <= 1


@pytest.mark.parametrize(
    ("num_q", "num_kv", "ranks", "q", "kv"),
    [
        (64, 8, 4, [16] * 4, [2] * 4),
        (16, 8, 3, [6, 6, 4], [3, 3, 2]),
        (14, 2, 4, [4, 3, 4, 3], [1] * 4),
        (14, 2, 3, [4, 3, 7], [1] * 3),
        (7, 1, 3, [3, 2, 2], [1] * 3),
        (64, 4, 8, [8] * 8, [1] * 8),
    ],
)
def test_heads_by_example(num_q: int, num_kv: int, ranks: int, q: list[int], kv: list[int]) -> None:
    shares = split_heads(num_q, num_kv, ranks)
    assert sizes([share.q for share in shares]) == q
    assert sizes([share.kv for share in shares]) == kv


def test_more_ranks_than_heads_or_columns_are_refused() -> None:
    with pytest.raises(ConfigError, match="14 query heads cannot be shared by 15 ranks"):
        split_heads(14, 2, 15)
    with pytest.raises(ConfigError, match="width 3 cannot be shared by 4 ranks"):
        split_columns(3, 4)
    with pytest.raises(ConfigError, match=r"1 query head cannot be .* use at most 1 rank$"):
        split_heads(1, 1, 2)


def test_columns_cover_everything_about_evenly() -> None:
    for width, ranks in itertools.product((*range(9, 200), 768, 11008, 18944, 25600), RANKS):
        shares = split_columns(width, ranks)
        assert joined(shares) == list(range(width))
        assert min(sizes(shares)) > 0
        assert max(sizes(shares)) <= max(-(-width // ranks), width / ranks * (1 + 1 / 16))


@pytest.mark.parametrize(
    ("width", "ranks", "expected"),
    [
        (25600, 4, [6400] * 4),
        (18944, 3, [6336, 6336, 6272]),
        (768, 8, [96] * 8),
        (768, 5, [160] * 4 + [128]),
        (73, 2, [37, 36]),
    ],
)
def test_columns_by_example(width: int, ranks: int, expected: list[int]) -> None:
    assert sizes(split_columns(width, ranks)) == expected


@pytest.mark.parametrize("block", [8, 64, 128])
def test_blocks_of_columns_stay_together(block: int) -> None:
    for width, ranks in itertools.product((9, 96, 384, 400, 768, 11008), RANKS):
        if -(-width // block) < ranks:
            with pytest.raises(ConfigError, match=f"in blocks of {block}, cannot be shared"):
                split_columns(width, ranks, block)
            continue
        shares = split_columns(width, ranks, block)
        assert joined(shares) == list(range(width))
        assert all(len(share) > 0 and share.start % block == 0 for share in shares)
    assert sizes(split_columns(384, 2, 128)) == [256, 128]  # units of 64 would give two of 192


def test_vocabularies_are_padded_to_equal_shares() -> None:
    for size, ranks in itertools.product((1, 211, 32_000, 50_257, 128_256, 151_936), RANKS):
        rows = vocab_rows(size, ranks)
        assert rows * ranks >= size
        assert rows * ranks - size < 16 * ranks
    assert vocab_rows(50_257, 1) == 50_257
    for size, ranks in itertools.product((128_256, 151_936), (2, 4, 8)):
        assert vocab_rows(size, ranks) * ranks == size
