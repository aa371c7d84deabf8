"""Reports what a step yields for prompt tokens: log-probabilities, or pooled rows; each once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from minisgl.core import Event, Plan, StepResult
from minisgl.core.event import PromptLogprobs
from minisgl.core.req import ALL, Req


def report_scores(
    plan: Plan, outcome: StepResult, rows: Sequence[Req], events: list[Event]
) -> list[Req]:
    """Append a `PromptLogprobs` for each row with values that are not reported yet.

    A request that was retracted computes some values again. If a row has a value that is NaN or
    infinite, its sampled id becomes -1. Returns the requests of such rows that sample no token.
    """
    damaged: list[Req] = []
    for scored, (logprobs, tops) in zip(plan.scored, outcome.scores, strict=True):
        row = scored.row
        req, start = rows[row], plan.starts[row]
        new = req.num_scored - start
        if req.ended or new >= len(logprobs):
            continue
        assert new >= 0, "a chunk before this one was not reported"
        if not all(map(math.isfinite, logprobs)):
            _mark(plan, outcome, row, req, damaged)
            continue
        events.append(PromptLogprobs(uid=req.uid, logprobs=logprobs[new:], tops=tops[new:]))
        req.num_scored = start + len(logprobs)
        if req.num_scored == req.num_prompt - 1:
            req.num_scored = ALL
    return damaged


def add_pooled(plan: Plan, outcome: StepResult, rows: Sequence[Req]) -> list[Req]:
    """Add the step's pooled rows to those of their requests. Divide a mean that is complete.

    Returns what `report_scores` does.
    """
    damaged: list[Req] = []
    for (row, first, num_tokens, _), values in zip(plan.pooled, outcome.pooled, strict=True):
        req = rows[row]
        if req.ended:
            continue
        if not np.isfinite(values).all():
            _mark(plan, outcome, row, req, damaged)
            continue
        assert plan.starts[row] + first == req.num_scored, "a token is pooled twice, or left out"
        req.pooled = values if req.pooled is None else req.pooled + values
        req.num_scored += num_tokens
        if req.sampling.pooling == "cls" or req.num_scored == req.num_prompt:
            req.num_scored = ALL
            if req.sampling.pooling == "mean":
                req.pooled = req.pooled / np.float32(req.num_prompt)
    return damaged


def _mark(plan: Plan, outcome: StepResult, row: int, req: Req, damaged: list[Req]) -> None:
    if row in plan.sample_rows:
        outcome.next_ids[plan.sample_rows.index(row)] = -1
    else:
        damaged.append(req)
