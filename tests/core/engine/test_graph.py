"""To what a step is padded, and what is left as it is."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from minisgl.attention.paged import SHORT_CONTEXT, HybridBackend, PagedAttnBackend
from minisgl.core import Plan
from minisgl.core.plan import NewPages
from minisgl.engine.device import StepSize
from minisgl.engine.graph import MAX_CONTEXT, MAX_NEW_PAGES, GraphRunner

Rows = list[tuple[int, int]]


def make_plan(num_decodes: int, prompts: Rows, num_pages: int = 0) -> Plan:
    """prompts: (start, end) of each."""
    rows = [*((9, 10) for _ in range(num_decodes)), *prompts]
    every = list(range(len(rows)))
    return Plan(
        step=0,
        uids=every,
        table_idxs=every,
        starts=[start for start, _ in rows],
        ends=[end for _, end in rows],
        token_ids=np.zeros(sum(end - start for start, end in rows), np.int32),
        num_decodes=num_decodes,
        sample_rows=every,
        output_idxs=every,
        new_pages=[NewPages(0, 0, 0, list(range(num_pages)))],
    )


def make_runner(
    monkeypatch: pytest.MonkeyPatch, max_rows: int, max_prompt_tokens: int = 8192
) -> GraphRunner:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    runner = GraphRunner(max_rows, max_prompt_tokens)
    runner.max_tokens = 2000
    return runner


def test_a_step_that_failed_is_prepared_again_before_it_is_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = make_runner(monkeypatch, 8)
    capture = Mock(return_value=(Mock(), torch.ones(1)))
    monkeypatch.setattr(runner, "_capture", capture)
    with pytest.raises(MemoryError):
        runner.run("shape", Mock(side_effect=MemoryError))
    compute = Mock(return_value=torch.zeros(1))
    assert runner.run("shape", compute) == 0
    assert not capture.called
    assert runner.run("shape", compute) == 1
    assert compute.call_count == 1


@pytest.mark.parametrize(
    ("num_decodes", "prompts", "size"),
    [
        (1, [], StepSize(1, 0, 0)),
        (33, [], StepSize(48, 0, 0)),
        (100, [], StepSize(100, 0, 0)),
        (101, [], None),
        (0, [(0, 64)], StepSize(0, 4, 64, MAX_CONTEXT)),
        (1, [(8, 73)], StepSize(16, 8, 128, MAX_CONTEXT)),
        (65, [(0, 1000), (0, 24)], StepSize(100, 64, 1024, MAX_CONTEXT)),
        (101, [(0, 64)], None),
        (0, [(0, 1537)], None),  # 2,048 would be more than `max_tokens`
        (0, [(0, 5000)], None),
        (0, [(MAX_CONTEXT - 1, MAX_CONTEXT)], StepSize(0, 4, 64, MAX_CONTEXT)),
        (0, [(MAX_CONTEXT, MAX_CONTEXT + 1)], None),
        # Many short ones: the size that has rows for them.
        (0, [(40, 41)] * 5, StepSize(0, 8, 128, MAX_CONTEXT)),
        (1, [(40, 42)] * 64, StepSize(16, 64, 1024, MAX_CONTEXT)),
        (0, [(40, 41)] * 65, None),
    ],
)
def test_steps_are_padded_to_few_sizes(
    num_decodes: int, prompts: Rows, size: StepSize | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert make_runner(monkeypatch, 100).padded(make_plan(num_decodes, prompts)) == size


@pytest.mark.parametrize(
    ("num_rows", "end", "size"),
    [
        (1, 10, StepSize(1, 0, 0, SHORT_CONTEXT)),
        (5, SHORT_CONTEXT, StepSize(8, 0, 0, SHORT_CONTEXT)),
        (2, SHORT_CONTEXT + 1, StepSize(2, 0, 0)),
        (9, 10, StepSize(16, 0, 0)),
    ],
)
def test_few_rows_with_short_contexts_have_a_size_where_a_backend_has_kernels_for_them(
    num_rows: int, end: int, size: StepSize, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner(monkeypatch, 100)
    runner.short_rows = 8
    plan = make_plan(num_rows, [])
    assert runner.padded(replace(plan, ends=[*plan.ends[1:], end])) == size


def test_a_hybrid_backend_has_the_short_rows_of_its_decode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("minisgl.plugins.find", lambda *_: None)
    prefill, decode = (Mock(spec=PagedAttnBackend, short_rows=rows) for rows in (3, 8))
    prefill.name = decode.name = "mock"
    assert HybridBackend(Mock(), prefill, decode).short_rows == 8


def test_more_new_pages_than_are_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(monkeypatch, 100)
    assert runner.padded(make_plan(0, [(0, 64)], MAX_NEW_PAGES)) is not None
    assert runner.padded(make_plan(0, [(0, 64)], MAX_NEW_PAGES + 1)) is None


def test_sizes_end_with_the_most_that_a_step_has(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(monkeypatch, 1, 100)
    assert (runner.beside_prompts, runner.prompt_sizes) == ([0, 1], [64, 100])
    assert runner.padded(make_plan(1, [(0, 70)])) == StepSize(1, 6, 100, MAX_CONTEXT)
    assert runner.padded(make_plan(1, [(0, 1)] * 7)) is None
    assert make_runner(monkeypatch, 16, 4096).prompt_sizes[-2:] == [3072, 4096]
    # As many rows as tokens would say that every token samples.
    assert make_runner(monkeypatch, 1, 1).padded(make_plan(0, [(0, 1)])) is None
