"""KV splits of decode attention: each key is in one split, and long contexts have many.

`TRITON_INTERPRET=1` runs it on a CPU.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="a CPU build of torch brings none")

from minisgl.kernel.triton.decode_attention import decode
from minisgl.kernel.triton.decode_config import FEW_BELOW, MAX_SPLITS, splits_at_once
from minisgl.kernel.triton.kv_split import CLASSES, SPLIT_ROWS, KVSplits, split_contexts
from minisgl.kvcache.pool import LayerPool

CORES, HEADS = 132, 8
SKEWED = [20_000, *range(1, 60), 6_000, *range(300, 340)]


def split(
    ends: list[int],
    device: torch.device,
    *,
    window: int | None = None,
    shared: int | None = None,
    dtype: torch.dtype = torch.float16,
) -> KVSplits:
    rows = torch.zeros(4, len(ends) + 3, dtype=torch.int32, device=device)
    rows[0, : len(ends)] = torch.arange(len(ends)).flip(0) + 7
    rows[3, : len(ends)] = torch.tensor(ends)
    rows[3, len(ends) :] = 10_000  # of prompts
    return split_contexts(
        rows, (len(ends), 2 * HEADS, 128), dtype, kv_dtype=dtype, num_kv_heads=HEADS, value_dim=128,
        window=window,
        common_prefix=None if shared is None else torch.tensor([shared]).int().to(device),
        rotates=False, num_cores=CORES,
        done_of_few=torch.zeros(FEW_BELOW, dtype=torch.int32, device=device),
    )  # fmt: skip


def check(got: KVSplits, ends: list[int], firsts: list[int]) -> list[int]:
    """Each row's keys from the first to the end are in its splits, in order, and large splits come
    before small ones. Returns the number of each row's."""
    table = got.table.tolist()
    assert len(table) == got.num_splits
    assert not got.done.any()
    used = [split for split in table if split[2] < split[3]]
    assert used == table[: len(used)]
    counts = []
    for row, (first, end) in enumerate(zip(firsts, ends, strict=True)):
        places = [place for place, split in enumerate(used) if split[0] == row]
        counts.append(len(places))
        assert len(places) <= MAX_SPLITS
        for index, place in enumerate(places):
            split = used[place]
            assert place == places[0] + index
            assert split[1] == len(ends) - 1 - row + 7
            assert split[2] == first < split[3]
            assert split[4:7] == [end, places[0], len(places)]
            assert split[3] == end or (split[3] - first) % got.config.keys == 0
            first = split[3]
        assert first == end
    assert len(used) <= len(ends) + at_once(got)
    sizes = [split[3] - split[2] for place, split in enumerate(used) if split[5] == place]
    if len(ends) <= SPLIT_ROWS:  # with more rows, the order holds within each SPLIT_ROWS of them
        class_size = max(sizes) / CLASSES
        assert all(max(sizes[i:]) < size + class_size + 1 for i, size in enumerate(sizes))
    return counts


def at_once(got: KVSplits) -> int:
    return splits_at_once(HEADS, CORES, got.config)


@pytest.mark.parametrize("num_rows", [1, 5, 40, 255, 256, 257, 600])
def test_equal_contexts_have_as_many_splits(num_rows: int, device: torch.device) -> None:
    ends = [640] * num_rows
    got = split(ends, device)
    counts = check(got, ends, [0] * num_rows)
    assert set(counts) == {min(max(at_once(got) // num_rows, 1), 640 // 64)}


def test_merging_takes_no_longer_than_reading(device: torch.device) -> None:
    """Of 2 heads each, splits of n keys are not shorter than the root of 2 n."""
    for end, count in ((640, 10), (4_096, 32), (32_768, 64)):
        assert check(split([end], device), [end], [0]) == [count]


@pytest.mark.parametrize("times", [1, 3])  # 3: more rows than `_split` reads at once
def test_long_contexts_have_many_splits(times: int, device: torch.device) -> None:
    """No split is longer than one and a half shares of all tokens."""
    ends = SKEWED * times
    got = split(ends, device)
    counts = check(got, ends, [0] * len(ends))
    share = sum(ends) / at_once(got)
    for count, end in zip(counts, ends, strict=True):
        assert end / count < max(1.5 * share + 1, 2 * 64)
    assert counts[0] > 20 / times
    assert counts[1] == 1


def test_shares_are_rounded_where_the_largest_split_ends_earlier(device: torch.device) -> None:
    """66 run at once. 25 equal contexts have 2.64 each: with 3 some would be left for later."""
    ends = [850] * 25
    assert check(split(ends, device), ends, [0] * 25) == [2] * 25
    ends = [100 + 1_785 * i // 63 for i in range(64)]  # shares of 0.1 to 1.96
    got = split(ends, device)
    assert at_once(got) == 66
    shares = [end * 66 / sum(ends) for end in ends]
    assert check(got, ends, [0] * 64) == [max(round(share), 1) for share in shares]


def test_padding_takes_no_share(device: torch.device) -> None:
    """As in a graph of 64 rows, of which 24 or 44 are padding."""
    ends = [*[640] * 40, *[1] * 24]
    assert check(split(ends, device), ends, [0] * len(ends)) == [1] * 64
    ends = [*[640] * 20, *[1] * 44]
    assert check(split(ends, device), ends, [0] * len(ends)) == [3] * 20 + [1] * 44


def test_windows(device: torch.device) -> None:
    ends = [1, 99, 100, 101, 5_000]
    assert check(split(ends, device, window=100), ends, [0, 0, 0, 1, 4_900]) == [1, 2, 2, 2, 2]


def test_common_prefixes_are_not_split(device: torch.device) -> None:
    """A row that pads has no keys of its own."""
    ends = [1_024 + 1, 1_024 + 700, 1]
    assert check(split(ends, device, shared=1_024), ends, [1_024, 1_024, 1])[2] == 0


def test_no_overflow(device: torch.device) -> None:
    ends = [10_000_000] * 3
    assert check(split(ends, device), ends, [0] * 3) == [22] * 3


@pytest.mark.parametrize("window", [None, 300])
def test_layers_take_turns_with_one_split(window: int | None, device: torch.device) -> None:
    """The counts of ended splits are 0 again when a layer has ended."""
    ends = [1, 700, 64, 65, 1_500, *[5] * 20]
    gen = torch.Generator().manual_seed(0)
    pages = -(-max(ends) // 16)
    table = torch.arange(len(ends) * pages, dtype=torch.int32).view(len(ends), pages)
    rows = torch.zeros(4, len(ends), dtype=torch.int32)
    rows[0], rows[3] = torch.arange(len(ends)), torch.tensor(ends)
    k, v = (torch.randn(table.numel(), 16, 2, 64, generator=gen).half() for _ in "kv")
    q = torch.randn(len(ends), 4, 64, generator=gen).half()
    q, k, v, table, rows = (x.to(device) for x in (q, k, v, table, rows))
    own = split_contexts(
        rows, q.shape, q.dtype, kv_dtype=k.dtype, num_kv_heads=2, value_dim=64, window=window,
        common_prefix=None, rotates=False, num_cores=CORES, done_of_few=rows,
    )  # fmt: skip
    outs = [torch.full_like(q, float("nan")) for _ in range(3)]
    for out in outs:
        decode(q, LayerPool(k=k, v=v), table, rows, own, scale=0.125, window=window, softcap=None,
               sinks=None, common_prefix=None, out_BNV=out)  # fmt: skip
        assert not own.done.any()
    assert outs[0].isfinite().all()
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])
