"""Plans with pooled prompts: each token counts once, whatever happens to the request."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from helpers.random_runs import run_once
from helpers.scheduling import add, make
from minisgl.core import Failed, Finished, Plan, StepResult
from minisgl.core.plan import Pooled
from minisgl.errors import NonFiniteLogits
from minisgl.scheduler import Scheduler
from minisgl_zoo.pooling import rows


@pytest.mark.parametrize("fail", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
def test_random_runs(grouped: bool, fail: bool) -> None:
    """With aborts, retractions, chunks, prefix hits, drafts' rows, other keys and failing steps."""
    for seed in range(50_000, 50_030):
        try:
            run_once(random.Random(seed), fail=fail, grouped=grouped, pooled=True)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def plan_alone(prompt: list[int], **sampling: Any) -> tuple[Scheduler, Plan]:
    scheduler = make()
    add(scheduler, 0, prompt, **sampling)
    plan = scheduler.plan()
    assert plan
    return scheduler, plan


def test_a_value_that_is_not_finite_fails_the_request_alone() -> None:
    scheduler, plan = plan_alone([1, 2, 3], pooling="mean")
    damaged = StepResult(next_ids=[5], pooled=[np.array([1.0, np.nan], np.float32)])
    [failed] = scheduler.commit(plan, damaged)
    assert isinstance(failed, Failed)
    assert failed.code == NonFiniteLogits.code
    assert not scheduler.runnable


def test_the_last_token_alone_is_pooled_from_a_cached_prompt() -> None:
    scheduler, plan = plan_alone([1] * 9, pooling="last")
    assert [tuple(each) for each in plan.pooled] == [(0, 8, 1, ())]
    row = np.array([2.0], np.float32)
    [*_, end] = scheduler.commit(plan, StepResult(next_ids=[5], pooled=[row]))
    assert isinstance(end, Finished)
    assert end.pooled == row.tobytes()
    add(scheduler, 1, [1] * 9, pooling="last", logit_ids=(4, 5))
    again = scheduler.plan()
    assert again
    assert (again.starts, again.ends) == ([8], [9])
    assert [tuple(each) for each in again.pooled] == [(0, 0, 1, (4, 5))]
    add(scheduler, 2, [1] * 9, pooling="mean")  # it needs the hidden states of all tokens
    whole = scheduler.plan()
    assert whole
    assert (whole.starts, whole.ends) == ([0], [9])


@pytest.mark.parametrize("wanted", [0, 1])
def test_a_token_that_nobody_gets_is_not_counted(wanted: int) -> None:
    """An embedded text has none, and is computed as if one were sampled."""
    sampling: dict[str, Any] = {"max_tokens": 1} if wanted else {"max_tokens": 0, "pooling": "cls"}
    scheduler, plan = plan_alone([1, 2, 3], **sampling)
    pooled = [np.ones(2, np.float32)] if plan.pooled else []
    scheduler.commit(plan, StepResult(next_ids=[5], pooled=pooled))
    assert (scheduler.stats.num_finished, scheduler.stats.num_output_tokens) == (1, wanted)


def test_logits_of_many_rows_are_computed_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside rows that ask for hidden states, of one token and of several."""
    monkeypatch.setattr(rows, "LOGIT_BYTES", 0)
    monkeypatch.setattr(rows, "MIN_ROWS", 2)
    sizes: list[int] = []

    def logits(x_RD: torch.Tensor) -> torch.Tensor:
        sizes.append(len(x_RD))
        return torch.cat((x_RD, -x_RD), dim=1)

    model: Any = SimpleNamespace(config=SimpleNamespace(vocab_size=4), logits=logits)
    x_UD = torch.arange(16.0).view(8, 2)
    asked = [(1, (3, 0)), (2, ()), (1, (1,)), (1, ()), (1, (2, 1)), (1, (0,)), (1, (2,))]
    firsts = np.cumsum([0, *(count for count, _ in asked[:-1])]).tolist()
    spans = [(first, Pooled(0, 0, *each)) for first, each in zip(firsts, asked, strict=True)]
    found = [row.tolist() for row in rows.pool_rows(model, x_UD, spans)]
    assert found == [[-1.0, 0.0], [6.0, 8.0], [7.0], [8.0, 9.0], [-10.0, 11.0], [12.0], [-14.0]]
    assert sizes == [2, 2, 1]
