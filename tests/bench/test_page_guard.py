"""The debug mode that finds wrong pages: quiet in long runs, loud when a plan is wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from helpers.guarded_runs import long_run, make_guarded
from minisgl.core import (
    Plan,
    SamplingParams,
    StepFailed,
    StepOutcome,
    StepResult,
)
from minisgl.core.plan import NewPages
from minisgl.engine import Engine
from minisgl.errors import EngineError


@pytest.fixture
def engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setenv("MINISGL_CHECK_PAGES", "1")
    engine = make_guarded(folder, "cpu")
    yield engine
    engine.close()


def test_a_long_run_touches_no_wrong_page(engine: Engine) -> None:
    assert engine._guard is not None
    _, retractions = long_run(engine, 150)
    assert retractions > 0


def plan(rows: list[tuple[int, int, int]], pages: list[tuple[int, int, int]]) -> Plan:
    """rows: (table row, start, end)."""
    num_tokens = sum(end - start for _, start, end in rows)
    return Plan(
        step=7,
        uids=[row for row, *_ in rows],
        table_idxs=[row for row, *_ in rows],
        starts=[start for _, start, _ in rows],
        ends=[end for *_, end in rows],
        token_ids=np.zeros(num_tokens, np.int32),
        num_decodes=0,
        sample_rows=list(range(len(rows))),
        output_idxs=[0] * len(rows),
        new_pages=[NewPages(0, row, index, [page]) for row, index, page in pages],
        begins=[(row, SamplingParams(temperature=0.0)) for row, *_ in rows],
    )


def test_an_unwritten_slot(engine: Engine) -> None:
    engine.launch(plan([(0, 0, 8)], [(0, 0, 50), (0, 1, 51)])).wait()
    # A cached prefix of two pages, of which the second was given out, but only half of it written.
    engine.launch(plan([(1, 0, 6)], [(1, 0, 60), (1, 1, 61)])).wait()
    engine.launch(plan([(2, 8, 9)], [(2, 0, 50), (2, 1, 51), (2, 2, 70)])).wait()
    with pytest.raises(EngineError, match="step 7: NaN in the logits: a row read a slot that"):
        engine.launch(plan([(3, 8, 9)], [(3, 0, 60), (3, 1, 61), (3, 2, 71)])).wait()


def test_what_a_failed_step_did_not_write_is_no_wrong_page(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step behind it was launched before anybody knew, and does not count."""

    def launch(reads: Plan) -> StepOutcome:
        return engine.launch(reads).wait()

    with monkeypatch.context() as patch:
        patch.setattr(engine.model, "forward", Mock(side_effect=MemoryError))
        assert isinstance(launch(plan([(0, 0, 8)], [(0, 0, 50), (0, 1, 51)])), StepFailed)
    behind = dataclasses.replace(plan([(0, 8, 9)], [(0, 2, 52)]), begins=[])
    assert isinstance(launch(behind), StepResult)
    with pytest.raises(EngineError, match="NaN in the logits"):
        launch(dataclasses.replace(plan([(0, 9, 10)], []), begins=[]))


def test_a_page_that_two_rows_have_is_not_written(engine: Engine) -> None:
    engine.launch(plan([(0, 0, 6)], [(0, 0, 50), (0, 1, 51)])).wait()
    shared = plan([(1, 4, 8)], [(1, 0, 50), (1, 1, 51)])
    engine.launch(shared).wait()  # row 1 takes page 51 anew: row 0 has lost it
    second = dataclasses.replace(plan([(0, 6, 7)], []), begins=[])
    with pytest.raises(EngineError, match=r"row 0 writes page 51, which rows \[1\] have"):
        engine.launch(second).wait()


def test_a_request_may_start_before_its_first_row(engine: Engine) -> None:
    engine.launch(plan([(0, 0, 4)], [(0, 0, 50), (1, 0, 50)])).wait()
    second = dataclasses.replace(plan([(1, 4, 8)], [(1, 1, 51)]), begins=[])
    assert isinstance(engine.launch(second).wait(), StepResult)


def test_it_is_off_by_default(folder: Path) -> None:
    engine = make_guarded(folder, "cpu")
    assert engine._guard is None
    engine.close()


def test_nan_of_the_model_is_reported(engine: Engine) -> None:
    next(engine.model.parameters()).owner.tensor.fill_(torch.nan)
    with pytest.raises(EngineError, match="or the model computes NaN by itself"):
        engine.launch(plan([(0, 0, 4)], [(0, 0, 5)])).wait()
