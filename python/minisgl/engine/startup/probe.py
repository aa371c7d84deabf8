"""Probes: steps without requests that start-up runs to compile, to measure and to capture.

All ranks run the same steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from minisgl.core import Plan, SamplingParams, StepFailed, StepResult
from minisgl.core.plan import Begin, NewPages
from minisgl.engine.tables import MIN_COMMON_TOKENS

if TYPE_CHECKING:
    from minisgl.engine.engine import Engine

GREEDY = SamplingParams(temperature=0.0)
RANDOM = SamplingParams(temperature=1.0, seed=0)


def run_probe(engine: Engine, plan: Plan) -> None:
    """Run the step and wait for it. Raises the error of a step that fails."""
    check_outcome(engine.launch(plan).wait())


def check_outcome(outcome: StepResult | StepFailed) -> None:
    """Raise the error of a step that failed."""
    if isinstance(outcome, StepFailed):
        raise outcome.error


def probe_plan(
    engine: Engine,
    num_decodes: int,
    prompts: Sequence[int] = (),
    *,
    before: int = 0,
    shared: bool = True,
    sampling: SamplingParams = RANDOM,
) -> Plan:
    """Return a plan of `num_decodes` decode rows, and of prompts with these numbers of tokens.

    It uses pages from 0 on, since no request owns pages yet. before: the tokens that each row has
    already; their KV is not computed. shared: all rows have these in the same pages.
    """
    num_rows, num_before = num_decodes + len(prompts), before // engine.page_size
    apart = 0 if shared else num_before
    pages = [list(range(row * apart, row * apart + num_before)) for row in range(num_rows)]
    next_page = max(num_before, num_rows * apart)
    for row in range(num_decodes):
        pages[row].append(next_page)
    next_page += num_decodes > 0
    for row, num_tokens in enumerate(prompts, num_decodes):
        end = next_page - (-num_tokens // engine.page_size)
        pages[row] += range(next_page, end)
        next_page = end
    return Plan(
        step=-1,
        uids=[-1] * num_rows,
        table_idxs=list(range(num_rows)),
        starts=[before] * num_rows,
        ends=[before + 1] * num_decodes + [before + num_tokens for num_tokens in prompts],
        token_ids=np.zeros(num_decodes + sum(prompts), np.int32),
        num_decodes=num_decodes,
        sample_rows=list(range(num_rows)),
        output_idxs=[0] * num_rows,
        # Window groups may have fewer pages. Which row writes a page last does not matter here.
        new_pages=[
            NewPages(number, row, 0, [page % group.num_pages for page in own] if number else own)
            for number, group in enumerate(engine.memory.groups)
            for row, own in enumerate(pages)
        ],
        begins=[Begin(row, sampling) for row in range(num_rows)],
    )


def common_prefix(engine: Engine) -> int:
    """Return the shortest common prefix that a step reads once for all rows, in whole pages."""
    return -(-MIN_COMMON_TOKENS // engine.page_size) * engine.page_size


def fits(engine: Engine, plan: Plan) -> bool:
    """Return whether the engine has room for the plan."""
    groups = engine.memory.groups
    return (
        plan.num_rows <= engine.max_decode_rows
        and plan.num_tokens - plan.num_decodes <= engine.max_prefill_tokens
        and max(plan.ends) <= engine.max_seq_len
        and all(max(run.pages) < groups[run.group].num_pages for run in plan.new_pages)
    )
