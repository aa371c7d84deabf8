"""A small scheduler, and its steps one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from helpers.books import check_books
from minisgl.core import (
    Accepted,
    Event,
    Failed,
    Plan,
    SamplingParams,
    StepResult,
)
from minisgl.core.image import Image
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
    images: Sequence[Image] = (),
    **sampling: Any,
) -> Accepted | Failed:
    message = UserMsg(
        images=tuple(images),
        uid=uid,
        ids=ids_to_bytes(prompt),
        sampling=SamplingParams(**sampling),
        priority=priority,
        share=share,
        namespace=namespace,
        grammar=grammar,
    )
    return scheduler.add(message)


def whole_image(start: int, end: int, key: int = 1) -> Image:
    """Return an image that is computed whole. key: tells images apart."""
    places = ids_to_bytes(np.arange(start, end, dtype=np.int32))
    return Image(digest=bytes([key]), places=places, token=49, shape=(1,), sizes=(), whole=True)


def spans(plan: Plan | None) -> list[tuple[int, int, int]]:
    assert plan is not None
    return list(zip(plan.uids, plan.starts, plan.ends, strict=True))


def settle(scheduler: Scheduler, plan: Plan | None, token: int = 5) -> list[Event]:
    assert plan is not None
    events = scheduler.commit(plan, StepResult(next_ids=[token] * len(plan.sample_rows)))
    check_books(scheduler)
    return events
