"""Plans and the arrays of their steps."""

from __future__ import annotations

from itertools import islice

import numpy as np

from minisgl.core import PROMISED, Plan, SamplingParams
from minisgl.core.plan import NewPages
from minisgl.engine.cpu import CpuDevice
from minisgl.engine.device import StepSize
from minisgl.engine.inputs import Array, StepInputs, make_inputs
from minisgl.engine.tables import RequestTables

MAX_RUNNING = 12
PAGE_SIZE = 4


def make_plan(num_decodes: int, prompts: list[tuple[int, int]], *, last_samples: bool) -> Plan:
    """Return a plan. prompts: (start, end) of each."""
    num_rows = num_decodes + len(prompts)
    starts = [7 * row + 3 for row in range(num_decodes)] + [start for start, _ in prompts]
    ends = [start + 1 for start in starts[:num_decodes]] + [end for _, end in prompts]
    num_tokens = sum(ends) - sum(starts)
    token_ids = np.arange(100, 100 + num_tokens, dtype=np.int32)
    token_ids[: num_decodes // 2] = PROMISED
    table_idxs = [(5 * row + 2) % MAX_RUNNING for row in range(num_rows)]
    pages = iter(range(1000))
    sample_rows = list(range(num_rows if last_samples else num_rows - 1))
    return Plan(
        step=0,
        uids=list(range(num_rows)),
        table_idxs=table_idxs,
        starts=starts,
        ends=ends,
        token_ids=token_ids,
        num_decodes=num_decodes,
        sample_rows=sample_rows,
        output_idxs=[3 * row for row in sample_rows],
        new_pages=[
            NewPages(0, table_idx, 0, list(islice(pages, -(-end // PAGE_SIZE))))
            for table_idx, end in zip(table_idxs, ends, strict=True)
        ],
        begins=[
            (table_idx, SamplingParams(temperature=0.1 + table_idx / 10, seed=table_idx))
            for table_idx in table_idxs
        ],
    )


def inputs_of(plan: Plan, size: StepSize | None) -> StepInputs:
    device = CpuDevice()
    try:
        tables = RequestTables(device, request_rows=MAX_RUNNING, max_pages=32)
        return make_inputs(plan, tables, PAGE_SIZE, size)
    finally:
        device.close()


def arrays_of(plan: Plan, size: StepSize | None) -> dict[str, Array]:
    step = inputs_of(plan, size)
    assert (step.shape is None) == (size is None)
    arrays = {**step.forward, **step.sample, "new_pages": step.new_pages}
    (arrays["slots"],) = step.forward["slots"]  # of one cache group
    return arrays
