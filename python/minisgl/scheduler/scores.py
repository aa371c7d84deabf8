"""Reports the log-probabilities of prompt tokens, each once."""

from __future__ import annotations

import math
from collections.abc import Sequence

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
    damaged = []
    for scored, (logprobs, tops) in zip(plan.scored, outcome.scores, strict=True):
        row = scored.row
        req, start = rows[row], plan.starts[row]
        new = req.num_scored - start
        if req.ended or new >= len(logprobs):
            continue
        assert new >= 0, "a chunk before this one was not reported"
        if not all(map(math.isfinite, logprobs)):
            if row in plan.sample_rows:
                outcome.next_ids[plan.sample_rows.index(row)] = -1
            else:
                damaged.append(req)
            continue
        events.append(PromptLogprobs(uid=req.uid, logprobs=logprobs[new:], tops=tops[new:]))
        req.num_scored = start + len(logprobs)
        if req.num_scored == req.num_prompt - 1:
            req.num_scored = ALL
    return damaged
