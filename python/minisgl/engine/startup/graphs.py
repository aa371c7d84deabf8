"""Chooses which steps with prompts are replayed from CUDA graphs, and captures the graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minisgl.attention.paged import SHORT_CONTEXT
from minisgl.engine.startup.measure import slowest_us
from minisgl.engine.startup.probe import (
    GREEDY,
    RANDOM,
    common_prefix,
    fits,
    probe_plan,
    run_probe,
)
from minisgl.engine.tables import MIN_COMMON_ROWS
from minisgl.utils.logger import get_logger

if TYPE_CHECKING:
    from minisgl.core import Plan
    from minisgl.engine.engine import Engine

logger = get_logger(__name__)

BUSY = 2
"""Launching takes so many times longer in a server than at its start, when no client, API process
or tokenizer uses the processor."""


def choose_prompt_graphs(engine: Engine) -> int:
    """Return the largest number of tokens for which a step with prompts is replayed from a graph.

    For a smaller step, launching kernel by kernel takes a busy host longer than computing takes the
    device. A larger step does not wait for its launches, so padding it would only cost time.
    """
    runner = engine.runner
    most = min(engine.max_seq_len, engine.memory.num_tokens)
    sizes = [size for size in runner.prompt_sizes if size <= most]
    if not sizes:
        return 0
    runner.max_tokens = 0
    launching_us = BUSY * _prompt_us(engine, sizes[0], rounds=8)
    chosen, us = 0.0, 0
    for size in sizes:
        runner.max_tokens = size
        last, last_us = chosen, us
        us = _prompt_us(engine, size)
        chosen = size
        if us >= launching_us:
            chosen = last + (size - last) * (launching_us - last_us) / (us - last_us)
            break
    else:
        chosen *= launching_us / us
    chosen = min(int(chosen), runner.prompt_sizes[-1] + runner.beside_prompts[-1])
    if engine.comm.rank == 0:
        logger.info(
            "a busy host launches a step in %.1f ms: steps of up to %s tokens with prompts are "
            "replayed from graphs",
            launching_us / 1e3,
            f"{chosen:,}",
        )
    return chosen


def capture_prompts(engine: Engine) -> None:
    """Capture the graphs of steps with prompts. A busy server needs them in its first seconds."""
    for size in engine.runner.prompt_sizes:
        for rows in engine.runner.beside_prompts:
            rows = min(rows, engine.max_running - 1)
            _capture(engine, probe_plan(engine, rows, [size]))


def capture_decodes(engine: Engine) -> None:
    """Capture the graphs of decode steps: greedy and random ones, with a common prefix and without,
    and with short and long contexts.

    Without this, the first two steps of each size would launch kernel by kernel and load kernels
    while requests wait. Steps whose sampling has filters are captured when they first occur.
    """
    for rows in engine.runner.decode_sizes:
        contexts = [(0, True)]
        if rows >= MIN_COMMON_ROWS:
            contexts.append((common_prefix(engine), True))
        if rows <= engine.runner.short_rows:
            contexts.append((SHORT_CONTEXT, False))
        for before, shared in contexts:
            for sampling in (GREEDY, RANDOM):
                plan = probe_plan(engine, rows, before=before, shared=shared, sampling=sampling)
                _capture(engine, plan)
        if rows >= engine.max_running:
            return  # only steps with drafts have more rows: captured when they first occur


def _capture(engine: Engine, plan: Plan) -> None:
    """Capture the graph of the step, if it fits and is replayed."""
    if fits(engine, plan) and engine.runner.padded(plan):
        for _ in range(2):  # the second run captures
            run_probe(engine, plan)


def _prompt_us(engine: Engine, num_tokens: int, rounds: int = 3) -> int:
    """Return the slowest rank's time of a step with one prompt, after one untimed run."""
    plan = probe_plan(engine, 0, [num_tokens], sampling=GREEDY)
    run_probe(engine, plan)
    return max(slowest_us(engine, [plan], rounds - 1)[0], 1)
