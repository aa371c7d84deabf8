"""Contexts side by side: how rows are split into runs, and the slots of their tokens."""

from __future__ import annotations

import pytest
import torch

from minisgl_kernels.contexts import context_slots, split_rows


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ([], []),
        ([5], [[5]]),
        ([4, 6], [[4, 6]]),
        ([4, 6, 1], [[4, 6], [1]]),
        ([25, 3], [[25], [3]]),  # longer than the most: alone
        ([3, 25, 3, 7], [[3], [25], [3, 7]]),
    ],
)
def test_rows_are_split_into_runs(ends: list[int], expected: list[list[int]]) -> None:
    assert [ends[run] for run in split_rows(ends, 10)] == expected


@pytest.mark.parametrize("page_size", [1, 4])
def test_slots_against_a_loop(page_size: int) -> None:
    gen = torch.Generator().manual_seed(0)
    table = torch.randperm(60, generator=gen).int().view(6, 10)
    table_idxs, ends = torch.tensor([4, 1, 3]).int(), torch.tensor([9, 1, 10]).int()
    slots, firsts = context_slots(table, table_idxs, ends, 20, page_size)
    expected = [
        int(table[row, position // page_size]) * page_size + position % page_size
        for row, end in zip(table_idxs.tolist(), ends.tolist(), strict=True)
        for position in range(end)
    ]
    assert slots.tolist() == expected
    assert firsts.tolist() == [0, 9, 10, 20]
    assert firsts.dtype == torch.int32
