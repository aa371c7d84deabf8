"""A request whose logits are not finite fails by name, and no other request notices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from helpers.books import check_books
from helpers.engine_runs import (
    Reference,
    Request,
    drive,
    greedy,
    make_engine,
    make_scheduler,
    prompts,
)
from minisgl.core import Failed, SamplingParams, Token
from minisgl.engine import Engine
from minisgl.message import SchedulerMsg, UserMsg, ids_to_bytes
from minisgl.scheduler import run
from minisgl_bench.fakes import ListInbox, ListOutbox

POISON = 77


@pytest.fixture(params=["torch", "cpu"])
def engine(reference: Reference, request: pytest.FixtureRequest) -> Iterator[Engine]:
    """The embedding of one id is NaN."""
    engine = make_engine(reference, attn=request.param, page_size=4, num_pages=200)
    yield engine
    engine.close()


def requests() -> list[Request]:
    """None of them has the poisoned id."""
    params = [greedy(16), SamplingParams(temperature=1.0, seed=3, max_tokens=16, logprobs=True)]
    return [
        ([token % POISON for token in prompt], params[index % 2])
        for index, prompt in enumerate(prompts(6))
    ]


def poison(engine: Engine) -> None:
    table: Any = engine.model.embedding.weight
    getattr(table, "tensor", table)[POISON] = torch.nan


@pytest.mark.parametrize("overlap", [True, False])
def test_only_the_request_with_nan_fails(engine: Engine, overlap: bool) -> None:
    expected = drive(engine, requests())
    poison(engine)
    scheduler, outbox = make_scheduler(engine), ListOutbox()
    bad = requests()[0][0] * 4
    bad[len(bad) // 2] = POISON
    logprobs = SamplingParams(temperature=1.0, seed=0, max_tokens=16, logprobs=True)
    cases = [*requests(), (bad, greedy(16)), ([*bad, 1], logprobs)]
    messages: list[SchedulerMsg] = [
        UserMsg(uid=uid, ids=ids_to_bytes(prompt), sampling=sampling)
        for uid, (prompt, sampling) in enumerate(cases)
    ]
    inbox = ListInbox([messages], more=lambda: [] if scheduler.runnable else None)
    run(scheduler, engine, inbox, outbox, overlap=overlap)
    check_books(scheduler)
    failed = [event for event in outbox.events if isinstance(event, Failed)]
    assert [(event.uid, event.code) for event in failed] == [
        (uid, "non_finite_logits") for uid in (6, 7)
    ]
    assert "NaN or infinity" in failed[0].message
    for uid, ids in enumerate(expected):
        got = [e.id for e in outbox.events if isinstance(e, Token) and e.uid == uid]
        assert got == ids, uid
    # The pages that held NaN serve others now: whatever was left in them does not matter.
    again = drive(engine, requests(), scheduler=scheduler, first_uid=20, overlap=overlap)
    assert again == expected
