"""Steps that nobody asked for, run at each start: to time, to measure, to capture.

All ranks run the same ones, and agree on what they find: `all_min` of each.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from minisgl.core import Plan, SamplingParams, StepFailed
from minisgl.utils.logger import get_logger

if TYPE_CHECKING:
    from minisgl.engine.engine import Engine

logger = get_logger(__name__)

CHUNK_TARGET_S = 0.3
"""A prefill chunk takes about this long at most: a pause that a reader of a streamed answer
notices but does not mind, and how long a new request may wait for its first step."""

MAX_PREFILL_TOKENS = 8192
"""No larger chunk even where it would be fast: activations grow with it, throughput does not."""

CHUNK_MULTIPLE = 64  # tokens; a measured chunk is rounded to it or to a power of two

GREEDY = SamplingParams(temperature=0.0)
RANDOM = SamplingParams(temperature=1.0, seed=0)

SAME_TIME = 1.1  # two measurements of one step differ by less than this factor


def run_probe(engine: Engine, plan: Plan) -> None:
    """Raises what the step fails with."""
    outcome = engine.launch(plan).wait()
    if isinstance(outcome, StepFailed):
        raise outcome.error


def probe_plan(
    engine: Engine,
    num_decodes: int,
    prompts: Sequence[int] = (),
    *,
    before: int = 0,
    sampling: SamplingParams = RANDOM,
) -> Plan:
    """A plan of rows that decode, and of prompts of so many tokens, in pages nobody owns yet.

    Before the tokens of each row come as many others, in the same whole pages for all of them,
    which no step has computed.
    """
    num_rows, num_before = num_decodes + len(prompts), before // engine.page_size
    new_pages = [(0, row, index, index) for row in range(num_rows) for index in range(num_before)]
    new_pages += [(0, row, num_before, num_before) for row in range(num_decodes)]
    next_page = num_before + (num_decodes > 0)
    for row, num_tokens in enumerate(prompts, num_decodes):
        for index in range(-(-num_tokens // engine.page_size)):
            new_pages.append((0, row, num_before + index, next_page))
            next_page += 1
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
        new_pages=new_pages,
        begins=[(row, sampling) for row in range(num_rows)],
    )


def fits(engine: Engine, plan: Plan) -> bool:
    """Whether the engine has room for it."""
    return (
        plan.num_rows <= engine.max_running
        and plan.num_tokens - plan.num_decodes <= engine.max_prefill_tokens
        and max(plan.ends) <= engine.max_seq_len
        and all(page < engine.memory.num_pages for *_, page in plan.new_pages)
    )


def tune(engine: Engine) -> None:
    """Let the device choose by time; not with several ranks, which would run different steps."""
    if engine.comm.size == 1:
        decode = probe_plan(engine, 1, sampling=GREEDY)
        engine.device.tune(lambda: run_probe(engine, decode))


def choose_chunks(engine: Engine) -> tuple[int, int]:
    """(most prompt tokens of a step, most while more requests decode than wait), from the measured
    rate."""
    device, comm = engine.device, engine.comm
    seconds = {size: _prefill_s(engine, size) for size in _probe_sizes(engine)}
    size = max(seconds)
    rate = comm.all_min(int(size / seconds[size]))
    most = chunk_tokens(rate, CHUNK_TARGET_S)
    least = max(device.min_chunk_tokens, comm.all_min(_tokens_in_the_same_time(seconds)))
    stalling = min(max(chunk_tokens(rate, device.stall_target_s), least), most)
    if comm.rank == 0:
        smaller = f", {stalling:,} while more requests decode than wait" if stalling < most else ""
        logger.info(
            "prefill runs at %s tokens/s: chunks of %s tokens%s (--max-prefill-length)",
            f"{rate:,.0f}",
            f"{most:,}",
            smaller,
        )
    return most, stalling


def choose_prompt_graphs(engine: Engine) -> None:
    """Up to how many tokens a step with prompts is padded and replayed from a graph: as many as the
    device computes in the time in which the host launches them kernel by kernel. Beyond, the host
    holds up nobody, and the device would wait for padding."""
    runner = engine.runner
    most = min(engine.max_seq_len, engine.memory.num_tokens)
    sizes = [size for size in runner.prompt_sizes if size <= most]
    if not sizes:
        return
    launching_s = _slowest_s(engine, sizes[0], repeats=8)  # all else is compared with it
    chosen, seconds = 0.0, 0.0
    for size in sizes:
        runner.max_tokens = size
        last, last_s = chosen, seconds
        seconds = _slowest_s(engine, size)
        chosen = size
        if seconds >= launching_s:
            chosen = last + (size - last) * (launching_s - last_s) / (seconds - last_s)
            break
    else:
        chosen *= launching_s / seconds
    runner.max_tokens = min(int(chosen), runner.prompt_sizes[-1] + runner.beside_prompts[-1])
    if engine.comm.rank == 0:
        logger.info(
            "launching a step takes %.1f ms: those of up to %s tokens with prompts are replayed "
            "from graphs",
            launching_s * 1e3,
            f"{runner.max_tokens:,}",
        )


def capture_prompts(engine: Engine) -> None:
    """The graphs of steps with prompts. A busy server would meet all of them in its first
    seconds of work, and twice each."""
    for size in engine.runner.prompt_sizes:
        for rows in engine.runner.beside_prompts:
            rows = min(rows, engine.max_running - 1)
            plan = probe_plan(engine, rows, [size])
            if fits(engine, plan) and engine.runner.padded(plan):
                for _ in range(2):  # the second is captured
                    run_probe(engine, plan)


def _probe_sizes(engine: Engine) -> list[int]:
    """Prompt tokens, of the longest probe and half as many, again and again."""
    device = engine.device
    sizes = [min(device.probe_tokens, engine.max_seq_len, engine.memory.num_tokens)]
    while sizes[-1] >= 2 * device.min_chunk_tokens:
        sizes.append(sizes[-1] // 2)
    return sizes


def _prefill_s(engine: Engine, num_tokens: int, repeats: int = 3) -> float:
    """What a step of so many prompt tokens takes, at least."""
    plan = probe_plan(engine, 0, [num_tokens], sampling=GREEDY)
    seconds = []
    for _ in range(repeats):  # the first warms up
        start = time.perf_counter()
        run_probe(engine, plan)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def _slowest_s(engine: Engine, num_tokens: int, repeats: int = 3) -> float:
    """What it takes the slowest rank, to a microsecond: the same number on all."""
    return -engine.comm.all_min(int(-1e6 * _prefill_s(engine, num_tokens, repeats))) / 1e6


def _tokens_in_the_same_time(seconds: dict[int, float]) -> int:
    """The most tokens whose step takes no longer than that of the fewest. So many hold up nobody
    for longer: it is the host's launching that takes the time, not the device's computing."""
    limit = SAME_TIME * seconds[min(seconds)]
    return max(size for size, taken in seconds.items() if taken <= limit)


def chunk_tokens(rate: float, seconds: float) -> int:
    """About as many tokens as take `seconds` at `rate` tokens a second."""
    chunk = max(int(rate * seconds), CHUNK_MULTIPLE)
    # An eighth of its size: a round chunk cuts round prompts into fewer pieces.
    multiple = max(CHUNK_MULTIPLE, 1 << max(chunk.bit_length() - 3, 0))
    return min(round(chunk / multiple) * multiple, MAX_PREFILL_TOKENS)
