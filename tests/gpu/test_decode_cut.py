"""Which slot of decode attention is whose: each key has one, and long contexts have many.

`TRITON_INTERPRET=1` runs it on a CPU.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="a CPU build of torch brings none")

from minisgl.kernel.decode_form import FEW_BELOW, MAX_PIECES
from minisgl.kernel.triton.decode_attention import MIN_PIECE, Cut, cut_contexts

CORES, HEADS = 132, 8
SKEWED = [20_000, *range(1, 60), 6_000, *range(300, 340)]


def cut(
    ends: list[int],
    device: torch.device,
    *,
    window: int | None = None,
    shared: int | None = None,
    dtype: torch.dtype = torch.float16,
) -> Cut:
    rows = torch.zeros(4, len(ends) + 3, dtype=torch.int32, device=device)
    rows[0, : len(ends)] = torch.arange(len(ends)).flip(0) + 7
    rows[3, : len(ends)] = torch.tensor(ends)
    rows[3, len(ends) :] = 10_000  # of prompts
    return cut_contexts(
        rows, (len(ends), 2 * HEADS, 128), dtype, num_kv_heads=HEADS, window=window,
        shared_1=None if shared is None else torch.tensor([shared], dtype=torch.int32).to(device),
        rotates=False, num_cores=CORES,
        zeros=torch.zeros(FEW_BELOW, dtype=torch.int32, device=device),
    )  # fmt: skip


def check(got: Cut, ends: list[int], firsts: list[int]) -> list[int]:
    """Each row's keys from the first to the end are in its slots, in order. Returns the number of
    slots of each row."""
    table = got.table.tolist()
    assert len(table) == got.num_slots
    assert not got.done.any()
    used = 0
    counts = []
    for row, (first, end) in enumerate(zip(firsts, ends, strict=True)):
        own = [slot for slot in table if slot[2] < slot[3] and slot[0] == row]
        counts.append(len(own))
        assert len(own) <= MAX_PIECES
        for index, slot in enumerate(own):
            assert table[used + index] == slot
            assert slot[1] == len(ends) - 1 - row + 7
            assert slot[2] == first < slot[3]
            assert slot[4:7] == [end, used, len(own)]
            assert slot[3] == end or (slot[3] - first) % MIN_PIECE == 0
            first = slot[3]
        assert first == end or not own
        used += len(own)
    assert all(slot[2] >= slot[3] for slot in table[used:])
    return counts


@pytest.mark.parametrize("num_rows", [1, 5, 40, 255, 256, 257, 600])
def test_equal_contexts_have_as_many_slots(num_rows: int, device: torch.device) -> None:
    ends = [640] * num_rows
    counts = check(cut(ends, device), ends, [0] * num_rows)
    assert set(counts) == {min(max(66 // num_rows, 1), 640 // MIN_PIECE)}


def test_long_contexts_have_many_slots(device: torch.device) -> None:
    """None has more than twice its share of all tokens."""
    counts = check(cut(SKEWED, device), SKEWED, [0] * len(SKEWED))
    share = sum(SKEWED) / 49
    for count, end in zip(counts, SKEWED, strict=True):
        assert end / count < max(2 * share, 2 * MIN_PIECE)
    assert counts[0] > 20
    assert counts[1] == 1


def test_padding_takes_no_share(device: torch.device) -> None:
    """As in a graph of 64 rows, of which few are anybody's."""
    ends = [*[640] * 40, *[1] * 24]
    assert check(cut(ends, device), ends, [0] * len(ends)) == [1] * 64
    ends = [*[640] * 20, *[1] * 44]
    assert check(cut(ends, device), ends, [0] * len(ends)) == [3] * 20 + [1] * 44


def test_windows(device: torch.device) -> None:
    ends = [1, 99, 100, 101, 5_000]
    check(cut(ends, device, window=100), ends, [0, 0, 0, 1, 4_900])


def test_shared_beginnings_are_not_cut(device: torch.device) -> None:
    """A row that pads has no keys of its own."""
    ends = [1_024 + 1, 1_024 + 700, 1]
    assert check(cut(ends, device, shared=1_024), ends, [1_024, 1_024, 1])[2] == 0


def test_no_overflow(device: torch.device) -> None:
    ends = [10_000_000] * 3
    assert check(cut(ends, device), ends, [0] * 3) == [22] * 3
