"""Chooses whether a CPU's steps run on one thread or on all.

A small model decodes faster on one thread, because its GEMMs take less time than waking the other
threads. If a decode step takes much longer than that, one thread is not even timed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from minisgl.engine.startup.probe import GREEDY, probe_plan, run_probe
from minisgl.utils.logger import get_logger
from minisgl.utils.text import counted

if TYPE_CHECKING:
    from minisgl.engine.engine import Engine

logger = get_logger(__name__)

LONG_STEP_S = 0.02
"""If a decode step on all threads takes longer, one thread is not timed. Waking a thread takes 5 to
50 us, and a step wakes threads for 4 to 8 GEMMs per layer: 1 to 10 ms in all for 28 layers."""
SURELY_LONG_S = 2 * LONG_STEP_S
"""If the first timed step takes longer, it is not timed again: a step of 8 B takes 0.4 s."""
TRIAL_S = 0.5
"""The most that the rounds together take, about."""
NUM_ROUNDS, LEAST_ROUNDS = 31, 7
"""A round times one decode step on all threads and one on a single thread: 0.2 s in all for the
built-in model. With 20 % noise the median ratio of 2 ms to 3 ms is on the wrong side of MARGIN less
than once in a million starts. Longer steps have fewer rounds."""
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
    if all_s > LONG_STEP_S:
        logger.info("steps run on %d threads (a decode step takes %.0f ms)", most, all_s * 1e3)
        return most
    ones, alls = [], []
    num_rounds = min(max(int(TRIAL_S / (4 * all_s)), LEAST_ROUNDS), NUM_ROUNDS)
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
