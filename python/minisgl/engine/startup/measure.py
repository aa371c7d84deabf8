"""Measures how long steps take. The scheduler uses it to keep the stall bound."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from minisgl.core import Plan
from minisgl.core.step_times import StepTimes
from minisgl.engine.startup.probe import GREEDY, fits, probe_plan, run_probe

if TYPE_CHECKING:
    from minisgl.engine.engine import Engine

LONG_STEP_US = 100_000
"""Prompts larger than one that takes longer than this are extrapolated. A model of 0.6 B on 2 CPU
cores is measured up to 64 tokens, which takes 1 s of the start."""
NUM_ROUNDS = 3
"""The shortest time of each step counts. With CUDA graphs the first round runs the steps kernel by
kernel, the second captures them, and the third replays them."""
DECODE_ROWS = 16
CONTEXT_ROWS = 3  # fewer than `MIN_COMMON_ROWS`, so that no common prefix is read once for all
CACHED_TOKENS = 4096  # before a prompt chunk, if the context has room for them


def measure_step_times(engine: Engine) -> StepTimes:
    """Return the times of this engine's steps. All ranks get the slowest rank's."""
    prompt_us = _prompt_times(engine)
    num_tokens = prompt_us[-1][0]
    rows = min(DECODE_ROWS, engine.max_running)
    few = min(CONTEXT_ROWS, engine.max_running)
    room = min(engine.max_seq_len, engine.memory.num_tokens) - num_tokens - engine.page_size
    start = min(CACHED_TOKENS, room) // engine.page_size * engine.page_size
    plans = [
        probe_plan(engine, 1, sampling=GREEDY),
        probe_plan(engine, rows, sampling=GREEDY),
        probe_plan(engine, few, sampling=GREEDY),
    ]
    if start > 0:
        plans += [
            probe_plan(engine, few, before=start, sampling=GREEDY),
            probe_plan(engine, 0, [num_tokens], before=start, sampling=GREEDY),
        ]
    one, many, few_us, *deep = slowest_us(engine, plans)
    context_ns = attend_ns = 0.0
    if deep:
        context_ns = max(deep[0] - few_us, 0) * 1e3 / (few * start)
        attend_ns = max(deep[1] - prompt_us[-1][1], 0) * 1e3 / (num_tokens * start)
    return StepTimes(
        prompt_us=tuple(prompt_us),
        decode_us=one,
        row_us=max(many - one, 0) / (rows - 1) if rows > 1 else 0.0,
        context_ns=context_ns,
        attend_ns=attend_ns,
    )


def _prompt_times(engine: Engine) -> list[tuple[int, float]]:
    """Return (tokens, microseconds) of steps with one prompt. The times never decrease."""
    room = min(engine.max_prefill_tokens, engine.max_seq_len, engine.memory.num_tokens)
    sizes, plans = [], []
    for size in sorted({min(size, room) for size in engine.device.measured_sizes}):
        plan = probe_plan(engine, 0, [size], sampling=GREEDY)
        if not fits(engine, plan):
            break
        sizes.append(size)
        plans.append(plan)
        if slowest_us(engine, [plan], rounds=1)[0] > LONG_STEP_US:
            break
    times: list[tuple[int, float]] = []
    longest = 0
    for size, us in zip(sizes, slowest_us(engine, plans), strict=True):
        longest = max(longest, us)
        times.append((size, float(longest)))
    return times


def slowest_us(engine: Engine, plans: Sequence[Plan], rounds: int = NUM_ROUNDS) -> list[int]:
    """Return the shortest time of each step in microseconds. All ranks get the slowest rank's.

    Each round times every step once, so that other load on the machine affects all of them.
    """
    best = [1e9] * len(plans)
    for _ in range(rounds):
        for index, plan in enumerate(plans):
            start = time.perf_counter()
            run_probe(engine, plan)
            best[index] = min(best[index], (time.perf_counter() - start) * 1e6)
    return [-engine.comm.all_min(-int(us)) for us in best]
