"""Measures steps: how many threads of a CPU they run on, and how long they take.

A small model decodes faster on one thread, because its GEMMs take less time than waking the other
threads. The scheduler uses the times of steps to keep the stall bound.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from minisgl.core import Plan
from minisgl.core.step_times import StepTimes
from minisgl.engine.extras import Probe
from minisgl.engine.startup.probe import GREEDY, check_outcome, fits, probe_plan, run_probe
from minisgl.utils.logger import get_logger
from minisgl.utils.text import counted

if TYPE_CHECKING:
    from minisgl.engine.engine import Engine

logger = get_logger(__name__)

# --- threads -----------------------------------------------------------------------------------

LONG_DECODE_S = 0.02
"""If a decode step on all threads takes longer, one thread is not timed: waking the threads for the
GEMMs of each layer then takes a small part of the step."""
SURELY_LONG_S = 2 * LONG_DECODE_S
"""If the first timed step takes longer, it is not timed again, so that a start with a large model
does not wait for it."""
TRIAL_S = 0.5
"""The most that the rounds together take, about."""
MOST_ROUNDS, LEAST_ROUNDS = 31, 7
"""A round times one decode step on all threads and one on a single thread. The median of so many is
on the right side of MARGIN even if each time is noisy. Longer steps have fewer rounds."""
MARGIN = 0.9
"""One thread is chosen if its median time is below this share of that of all threads."""
AGREEMENT = 0.7
"""... and if it is faster in at least this share of the rounds."""


def choose_threads(engine: Engine) -> int:
    """Return the number of threads for the engine's steps."""
    plan = probe_plan(engine, 1, sampling=GREEDY)
    return fastest_threads(
        engine.device.max_threads, engine.device.set_threads, lambda: run_probe(engine, plan)
    )


def fastest_threads(
    most: int,
    set_threads: Callable[[int], None],
    decode: Callable[[], object],
    clock: Callable[[], float] = time.perf_counter,
) -> int:
    """Return 1 or `most`: the number of threads on which `decode` is faster.

    Returns `most` unless one thread is clearly faster, so that noise does not decide.
    """
    if most == 1:
        logger.info("steps run on 1 thread")
        return 1

    def time_on(count: int) -> float:
        set_threads(count)
        decode()  # the first step after a change starts the threads
        start = clock()
        decode()
        return clock() - start

    all_s = time_on(most)
    if all_s <= SURELY_LONG_S:
        all_s = statistics.median((all_s, time_on(most), time_on(most)))
    if all_s > LONG_DECODE_S:
        logger.info("steps run on %d threads (a decode step takes %.0f ms)", most, all_s * 1e3)
        return most
    ones, alls = [], []
    num_rounds = min(max(int(TRIAL_S / (4 * all_s)), LEAST_ROUNDS), MOST_ROUNDS)
    for _ in range(num_rounds):  # alternating, so that other load affects both
        ones.append(time_on(1))
        alls.append(time_on(most))
    ratio = statistics.median(one / all_ for one, all_ in zip(ones, alls, strict=True))
    num_faster = sum(one < all_ for one, all_ in zip(ones, alls, strict=True))
    chosen = 1 if ratio < MARGIN and num_faster >= AGREEMENT * num_rounds else most
    logger.info(
        "steps run on %s: a decode step takes %.1f ms on 1 thread and %.1f ms on %d (1 thread was "
        "faster in %d of %d rounds; it is taken if it is clearly faster)",
        counted(chosen, "thread"),
        statistics.median(ones) * 1e3,
        statistics.median(alls) * 1e3,
        most,
        num_faster,
        num_rounds,
    )
    return chosen


# --- times -------------------------------------------------------------------------------------

LONG_STEP_US = 100_000
"""Prompts larger than one that takes longer than this are extrapolated, so that the start stays
short."""
NUM_ROUNDS = 3
"""The shortest time of each step counts. With CUDA graphs the first round runs the steps kernel by
kernel, the second captures them, and the third replays them."""
SHORT_STEP_US = 5_000
"""Decode steps that take less alone are timed one behind the other, as a server runs them: then the
host launches a step while the device computes the one before."""
NUM_BEHIND = 4
DECODE_ROWS, MANY_DECODE_ROWS = 16, 64
"""Rows of the decode step that shows what a row adds; the larger number where a prompt of as many
tokens is a short step, because each of a few rows then takes longer than each of many."""
CONTEXT_ROWS = 3  # fewer than `MIN_COMMON_ROWS`, so that no common prefix is read once for all
CACHED_TOKENS = 4096  # before a prompt chunk, if the context has room for them
IMAGE_SIDES = (128, 512, 1024, 2048)  # up to the first that is a long step


def measure_step_times(engine: Engine) -> StepTimes:
    """Return the times of this engine's steps. All ranks get the slowest rank's."""
    clock = _Clock(engine)
    prompt_us = _prompt_times(engine, clock)
    num_tokens = prompt_us[-1][0]
    if not clock.has_time():
        return _of_few_steps(engine, prompt_us)
    has_short = any(size >= MANY_DECODE_ROWS and us <= SHORT_STEP_US for size, us in prompt_us)
    rows = min(MANY_DECODE_ROWS if has_short else DECODE_ROWS, engine.max_decode_rows)
    few = min(CONTEXT_ROWS, engine.max_decode_rows)
    room = min(engine.max_seq_len, engine.memory.num_tokens) - num_tokens - engine.page_size
    start = min(CACHED_TOKENS, room) // engine.page_size * engine.page_size
    decodes = [(1, 0), (rows, 0), (few, 0), *([(few, start)] if start > 0 else [])]
    plans = [probe_plan(engine, n, before=before, sampling=GREEDY) for n, before in decodes]
    (one, many, few_us, *deep_us), gap_us = _decode_us(engine, plans, clock)
    times = StepTimes(
        prompt_us=tuple(prompt_us),
        decode_us=one,
        row_us=max(many - one, 0) / (rows - 1) if rows > 1 else 0.0,
        gap_us=gap_us,
        padded_tokens=engine.tuning.graph_tokens,
    )
    if not deep_us:
        return times
    resume_us, attend_ns = _cost_of_cached(engine, prompt_us, times.default_chunk, start, clock)
    return replace(
        times,
        context_ns=max(deep_us[0] - few_us, 0) * 1e3 / (few * start),
        resume_us=resume_us,
        attend_ns=attend_ns,
    )


def _cost_of_cached(
    engine: Engine,
    prompt_us: Sequence[tuple[int, float]],
    chunk: int,
    start: int,
    clock: _Clock,
) -> tuple[float, float]:
    """Return `resume_us` and `attend_ns` of `StepTimes`.

    `resume_us` is what a chunk behind one page adds, without its pairs, on a device that compiles
    kernels: another one attends to cached tokens. A CPU has one for all, so it is 0 there.

    A chunk of few tokens leaves a part of a GPU idle, so a pair of the default chunk may take
    longer than one of the largest.
    """
    sizes = {max(size for size, _ in prompt_us if size <= chunk), prompt_us[-1][0]}
    timed = [(size, us) for size, us in prompt_us if size in sizes]

    def behind_us(before: int) -> list[float]:
        if not before:
            return [us for _, us in timed]
        plans = [probe_plan(engine, 0, [size], before=before, sampling=GREEDY) for size, _ in timed]
        return [float(us) for us in slowest_us(engine, plans, clock=clock)]

    compiles = bool(engine.device.warm_up_rows(engine.max_running))
    page = engine.page_size if compiles and engine.page_size < start else 0
    resume_us = attend_ns = 0.0
    for (size, fresh), shallow, deep in zip(timed, behind_us(page), behind_us(start), strict=True):
        pair_us = max(deep - shallow, 0) / (size * (start - page))
        resume_us = max(resume_us, shallow - fresh - size * page * pair_us)
        attend_ns = max(attend_ns, pair_us * 1e3)
    return resume_us, attend_ns


def _of_few_steps(engine: Engine, prompt_us: Sequence[tuple[int, float]]) -> StepTimes:
    """Return the times of a model whose first steps took all of `Device.measuring_s`: one decode
    step is timed, a decode row takes as long as a token of the smallest prompt, and what attending
    to more tokens takes is left out."""
    [one] = slowest_us(engine, [probe_plan(engine, 1, sampling=GREEDY)], rounds=1)
    tokens, us = prompt_us[0]
    return StepTimes(
        prompt_us=tuple(prompt_us),
        decode_us=one,
        row_us=max(us - one, 0.0) / (tokens - 1) if tokens > 1 else 0.0,
        padded_tokens=engine.tuning.graph_tokens,
    )


def _decode_us(engine: Engine, plans: Sequence[Plan], clock: _Clock) -> tuple[list[int], float]:
    """Return the time of each decode step in microseconds, as a stream has it, and how much longer
    the first one takes alone; 0 if the steps are long."""
    alone = slowest_us(engine, plans, clock=clock)
    if max(alone) > SHORT_STEP_US:
        return alone, 0.0
    best = [1e9] * len(plans)
    for _ in range(NUM_ROUNDS):
        for index, plan in enumerate(plans):
            before = engine.launch(plan)
            start = time.perf_counter()
            for _ in range(NUM_BEHIND):
                work = engine.launch(plan)
                check_outcome(before.wait())
                before = work
            best[index] = min(best[index], (time.perf_counter() - start) * 1e6 / NUM_BEHIND)
            check_outcome(before.wait())
    streamed = [-engine.comm.all_min(-int(us)) for us in best]
    return streamed, float(max(alone[0] - streamed[0], 0))


def _prompt_times(engine: Engine, clock: _Clock) -> list[tuple[int, float]]:
    """Return (tokens, microseconds) of steps with one prompt. The times never decrease."""
    room = min(engine.max_prefill_tokens, engine.max_seq_len, engine.memory.num_tokens)
    sizes, plans, firsts = [], [], []
    for size in sorted({min(size, room) for size in engine.device.measured_sizes}):
        plan = probe_plan(engine, 0, [size], sampling=GREEDY)
        if not fits(engine, plan):
            break
        sizes.append(size)
        plans.append(plan)
        firsts += slowest_us(engine, [plan], rounds=1)
        if firsts[-1] > LONG_STEP_US:
            break
    again = slowest_us(engine, plans, clock=clock) if clock.has_time() else firsts
    times: list[tuple[int, float]] = []
    longest = 0
    for size, first, us in zip(sizes, firsts, again, strict=True):
        longest = max(longest, min(first, us))
        times.append((size, float(longest)))
    return times


def measure_image_ns(engine: Engine) -> float:
    """Return `StepTimes.image_ns`; 0 without a vision tower. All ranks get rank 0's."""
    if not engine.vision:
        return 0.0
    image_ns, most_bytes = 0.0, 0
    for side in IMAGE_SIDES:
        probe = engine.vision.probe(side)
        if probe is None or probe.num_bytes <= most_bytes:  # the processor makes it no larger
            break
        seconds, part = _probe_s(engine, probe)
        if part == 1:  # the first time loads kernels
            seconds, part = _probe_s(engine, probe)
        whole_s = seconds / part
        image_ns, most_bytes = whole_s * 1e9 / probe.num_bytes, probe.num_bytes
        if whole_s * 1e6 > LONG_STEP_US:
            break
    return -engine.comm.all_min(-int(image_ns * 1e3)) / 1e3


def _probe_s(engine: Engine, probe: Probe) -> tuple[float, float]:
    """Return the seconds of a probe, and which part of the tower has run."""
    parts: list[float] = []
    start = time.perf_counter()
    engine.synchronize(lambda: parts.append(probe.run()))
    return time.perf_counter() - start, parts[0]


class _Clock:
    """Says whether there is time to time a step again, to all ranks the same."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._end = engine, time.perf_counter() + engine.device.measuring_s

    def has_time(self) -> bool:
        return bool(self._engine.comm.all_min(int(time.perf_counter() < self._end)))


def slowest_us(
    engine: Engine,
    plans: Sequence[Plan],
    rounds: int = NUM_ROUNDS,
    clock: _Clock | None = None,
) -> list[int]:
    """Return the shortest time of each step in microseconds. All ranks get the slowest rank's.

    Each round times every step once, so that other load on the machine affects all of them. clock:
    rounds after the first begin only while it has time.
    """
    best = [1e9] * len(plans)
    for number in range(rounds):
        if number and clock and not clock.has_time():
            break
        for index, plan in enumerate(plans):
            start = time.perf_counter()
            run_probe(engine, plan)
            best[index] = min(best[index], (time.perf_counter() - start) * 1e6)
    return [-engine.comm.all_min(-int(us)) for us in best]
