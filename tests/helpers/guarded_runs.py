"""Engines that check the pages of each step."""

from __future__ import annotations

import random
from pathlib import Path

from helpers.books import check_books
from helpers.engine_runs import VOCAB, make_scheduler
from minisgl.core import (
    Failed,
    Finished,
    SamplingParams,
)
from minisgl.engine import Engine, EngineConfig
from minisgl.message import AbortMsg, SchedulerMsg, UserMsg, ids_to_bytes
from minisgl.scheduler import run
from minisgl_bench.fakes import ListInbox, ListOutbox


def make_guarded(folder: Path, device: str) -> Engine:
    """Return an engine with few pages, so that requests are retracted and cached pages evicted."""
    return Engine(
        EngineConfig(
            model=str(folder),
            device=device,
            num_pages=72,
            page_size=4,
            max_running_requests=12,
            max_prefill_length=32,
        )
    )


def long_run(engine: Engine, count: int) -> tuple[int, int]:
    """Run `count` requests with common prefixes, a tenth of them aborted.

    Returns the numbers of finished requests and of retractions.
    """
    rng = random.Random(0)
    beginnings = [[rng.randrange(VOCAB) for _ in range(40)] for _ in range(4)]
    turns: list[list[SchedulerMsg]] = []
    for uid in range(count):
        prompt = rng.choice(beginnings)[: rng.randrange(41)]
        prompt = prompt + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 40))]
        sampling = SamplingParams(
            max_tokens=rng.randrange(1, 60), temperature=rng.choice([0.0, 1.0]), seed=uid
        )
        messages: list[SchedulerMsg] = [
            UserMsg(uid=uid, ids=ids_to_bytes(prompt), sampling=sampling)
        ]
        if rng.random() < 0.1:
            messages.append(AbortMsg(uid=rng.randrange(uid + 1)))
        turns += [messages, *([[]] * rng.randrange(4))]
    scheduler = make_scheduler(engine, max_queued=count)
    outbox = ListOutbox()
    run(
        scheduler,
        engine,
        ListInbox(turns, more=lambda: [] if scheduler.runnable else None),
        outbox,
    )
    check_books(scheduler)
    ended = [event.uid for event in outbox.events if isinstance(event, Finished)]
    assert sorted(ended) == list(range(count))
    assert not any(isinstance(event, Failed) for event in outbox.events)
    return len(ended), scheduler.stats.num_retractions
