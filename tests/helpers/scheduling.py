"""A small scheduler, and its steps one by one."""

from __future__ import annotations

from typing import Any

from helpers.books import check_books
from minisgl.core import (
    Accepted,
    Event,
    Failed,
    Plan,
    SamplingParams,
    StepResult,
)
from minisgl.message import NO_KEY, KeyShare, UserMsg, ids_to_bytes
from minisgl.scheduler import Scheduler, SchedulerConfig
from minisgl.scheduler.drafting import CreateDrafts, create_drafts

EOS = 99


def make(*, create_drafts: CreateDrafts = create_drafts, **changes: Any) -> Scheduler:
    settings: dict[str, Any] = {
        "num_pages": 64,
        "page_size": 4,
        "max_seq_len": 200,
        "vocab_size": 100,
        "eos_ids": frozenset([EOS]),
        "max_prefill_tokens": 32,
        "max_running": 8,
    }
    return Scheduler(SchedulerConfig(**(settings | changes)), create_drafts=create_drafts)


def add(
    scheduler: Scheduler,
    uid: int,
    prompt: list[int],
    *,
    priority: int = 0,
    share: KeyShare = NO_KEY,
    namespace: str = "",
    grammar: str = "",
    **sampling: Any,
) -> Accepted | Failed:
    message = UserMsg(
        uid=uid,
        ids=ids_to_bytes(prompt),
        sampling=SamplingParams(**sampling),
        priority=priority,
        share=share,
        namespace=namespace,
        grammar=grammar,
    )
    return scheduler.add(message)


def spans(plan: Plan | None) -> list[tuple[int, int, int]]:
    assert plan is not None
    return list(zip(plan.uids, plan.starts, plan.ends, strict=True))


def settle(scheduler: Scheduler, plan: Plan | None, token: int = 5) -> list[Event]:
    assert plan is not None
    events = scheduler.commit(plan, StepResult(next_ids=[token] * len(plan.sample_rows)))
    check_books(scheduler)
    return events
