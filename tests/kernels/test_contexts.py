"""Contexts side by side: how rows are split into runs, the slots of their tokens, and what backends
for prompts say of decode rows."""

from __future__ import annotations

import pytest
import torch

from helpers.step_plans import make_plan
from minisgl.attention.flash_infer import FlashInferBackend
from minisgl.attention.paged import PagedAttnBackend
from minisgl_kernels.contexts import context_slots, split_rows
from minisgl_kernels.flash_attn2 import FlashAttention2Backend


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


@pytest.mark.parametrize("kind", [FlashInferBackend, FlashAttention2Backend])
def test_a_prompt_backend_says_that_a_step_has_drafts(kind: type[PagedAttnBackend]) -> None:
    """Else the decode kernels beside it would attend before the keys of all drafts are stored."""
    backend = kind.__new__(kind)  # its package and a GPU may be missing
    for num_drafts in (0, 2):
        plan = make_plan(4, [], last_samples=True)
        plan.num_drafts = num_drafts
        metadata = backend.prepare(plan)
        assert metadata.has_drafts == (num_drafts > 0)
        assert metadata.is_short
