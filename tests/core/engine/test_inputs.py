"""A padded step's arrays say what its own say, and beside that nothing that has an effect."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from helpers.step_plans import MAX_RUNNING, arrays_of, make_plan
from minisgl.core import BatchSamplingArgs, Plan, SamplingParams
from minisgl.core.plan import NewPages
from minisgl.engine.cpu import CpuDevice
from minisgl.engine.device import StepSize
from minisgl.engine.inputs import NO_SLOT, mask_arrays
from minisgl.engine.tables import MIN_COMMON_ROWS, RequestTables
from minisgl.kernel.ops import Ops
from minisgl.kernel.registry import create_ops


@pytest.mark.parametrize("last_samples", [True, False])
@pytest.mark.parametrize(
    ("num_decodes", "prompts", "size"),
    [
        (3, [], StepSize(8, 0, 0)),
        (8, [], StepSize(8, 0, 0)),
        (0, [(0, 20)], StepSize(0, 4, 32)),
        (3, [(8, 20), (0, 9)], StepSize(4, 4, 32)),
        (4, [(8, 20), (4, 9), (0, 15)], StepSize(4, 3, 32)),
        (6, [(0, 3), (1, 2)], StepSize(11, 4, 8)),
    ],
)
def test_padding_has_no_effect(
    num_decodes: int, prompts: list[tuple[int, int]], size: StepSize, last_samples: bool
) -> None:
    plan = make_plan(num_decodes, prompts, last_samples=last_samples or not prompts)
    exact, padded = arrays_of(plan, None), arrays_of(plan, size)
    extra = size.num_decodes - num_decodes

    tokens = np.arange(plan.num_tokens)
    tokens[num_decodes:] += extra
    rows = np.arange(plan.num_rows)
    rows[num_decodes:] += extra
    for name in ("token_ids", "positions", "slots"):
        assert len(padded[name]) == size.num_tokens
        assert (padded[name][tokens] == exact[name]).all(), name
    padding_tokens = np.setdiff1d(np.arange(size.num_tokens), tokens)
    assert (padded["slots"][padding_tokens] == NO_SLOT).all()
    assert (padded["token_ids"][padding_tokens] == 0).all()  # an embedding that there is
    assert (padded["positions"][padding_tokens] == 0).all()

    assert padded["rows"].shape == (4, size.num_rows)
    moved = exact["rows"].copy()
    moved[1, num_decodes:] += extra
    assert (padded["rows"][:, rows] == moved).all()
    padding_rows = np.setdiff1d(np.arange(size.num_rows), rows)
    table_idx, first, length, end = padded["rows"][:, padding_rows]
    assert (table_idx == MAX_RUNNING).all()
    assert (length == (padding_rows < size.num_decodes)).all()
    assert (end == length).all()
    assert (first + length <= size.num_tokens).all()

    count = len(plan.sample_rows)
    num_positions = len(padded["sample_positions"])
    assert num_positions == min(size.num_rows, MAX_RUNNING)
    assert (padded["sample_positions"][:count] == tokens[exact["sample_positions"]]).all()
    assert (padded["sample_positions"] < size.num_tokens).all()
    if not prompts:  # the model need not look for those that sample
        assert (padded["sample_positions"] == np.arange(num_positions)).all()
    assert (padded["table_idxs"][count:] == MAX_RUNNING).all()
    for name in {"table_idxs", "temperatures", "seeds", "output_idxs"} & padded.keys():
        assert len(padded[name]) == (count if prompts else num_positions)
        assert (padded[name][:count] == exact[name]).all(), name

    num_pages = exact["new_pages"].shape[1]
    assert num_pages == sum(len(run.pages) for run in plan.new_pages)
    assert (padded["new_pages"][:, :num_pages] == exact["new_pages"]).all()
    assert (padded["new_pages"][0, num_pages:] == MAX_RUNNING).all()
    assert all(padded[name].dtype == array.dtype for name, array in exact.items())


@pytest.mark.parametrize("page_size", [16, 48, 256, 512, 1024])
def test_shared_beginnings_are_found_at_every_page_size(page_size: int) -> None:
    """Rows of 1,024 tokens in the same pages, then one of its own, and another's old pages."""
    device, num_shared = CpuDevice(), 1024 // page_size
    rows = list(range(MIN_COMMON_ROWS))
    pages = [NewPages(0, row, 0, list(range(num_shared))) for row in rows]
    pages += [NewPages(0, row, num_shared, [1000 + row] * 3) for row in rows]
    start = num_shared * page_size
    plan = Plan(
        step=0,
        uids=rows,
        table_idxs=rows,
        starts=[start] * len(rows),
        ends=[start + 1] * len(rows),
        token_ids=np.zeros(len(rows), np.int32),
        num_decodes=len(rows),
        sample_rows=rows,
        output_idxs=[0] * len(rows),
        new_pages=pages,
    )
    try:
        tables = RequestTables(device, request_rows=len(rows), max_pages=num_shared + 3)
        tables.update(plan)
        assert tables.common_tokens(plan, page_size) == num_shared * page_size
    finally:
        device.close()


def test_a_top_p_below_the_least_float32_keeps_the_first() -> None:
    plan = make_plan(0, [(0, 5)], last_samples=True)
    sampling = SamplingParams(temperature=1.0, top_p=1e-50)
    plan = dataclasses.replace(plan, begins=[(plan.table_idxs[0], sampling)])
    (top_p,) = arrays_of(plan, None)["top_ps"]
    logits = torch.randn(1, 50)
    args = BatchSamplingArgs(
        all_greedy=False,
        temperatures=torch.ones(1),
        top_ps=torch.tensor([top_p]),
        seeds=torch.arange(1),
        output_idxs=torch.arange(1),
    )
    for ops in (Ops(), create_ops(torch.device("cpu"))):
        assert ops.sample(logits, args).tolist() == [int(logits.argmax())]


def test_a_rank_masks_the_rows_that_it_samples() -> None:
    masks = [np.full(2, row, np.uint32) for row in (1, 4, 6)]
    arrays = mask_arrays([1, 4, 6], masks, range(4, 8))
    assert arrays["mask_rows"].tolist() == [0, 2]
    assert arrays["masks"].tolist() == [[4, 4], [6, 6]]
    assert mask_arrays([1, 4], masks[:2], range(5, 8)) == {}
