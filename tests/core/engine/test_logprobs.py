"""Log-probabilities of sampled tokens: those of transformers' logits, for the rows that ask."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from helpers.engine_ranks import engines, together
from helpers.engine_runs import Reference, Request, drive, make_engine, make_scheduler, prompts
from helpers.logprob_checks import check_logprobs
from helpers.replay import replay_steps
from helpers.step_plans import arrays_of, make_plan
from minisgl.core import SamplingParams
from minisgl.engine import Engine
from minisgl.engine.device import StepSize
from minisgl.engine.inputs import StepShape
from minisgl_bench.fakes import ListOutbox


@pytest.fixture(scope="module", params=["torch", "cpu"])
def engine(reference: Reference, request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = make_engine(reference, attn=request.param, page_size=4)
    yield engine
    engine.close()


def mixed_requests(count: int = 6, max_tokens: int = 16, *, top: bool = False) -> list[Request]:
    """Greedy and filtered requests; two of three ask for log-probabilities.

    top: one of three asks for the most likely tokens.
    """
    return [
        (
            prompt,
            SamplingParams(
                temperature=0.0 if index % 2 else 1.5,
                top_k=index * 5,
                seed=index,
                max_tokens=max_tokens,
                logprobs=index % 3 > 0,
                top_logprobs=(0, 0, 5)[index % 3] if top else 0,
            ),
        )
        for index, prompt in enumerate(prompts(count))
    ]


@pytest.mark.parametrize("top", [False, True])
@pytest.mark.parametrize("overlap", [True, False])
def test_logprobs_are_those_of_transformers_logits(
    engine: Engine, reference: Reference, overlap: bool, top: bool
) -> None:
    requests, outbox = mixed_requests(top=top), ListOutbox()
    drive(engine, requests, turns=[0, 1, 2, 5, 9, 9], overlap=overlap, outbox=outbox)
    check_logprobs(reference, requests, outbox)


def test_logprobs_of_retracted_requests(engine: Engine, reference: Reference) -> None:
    requests, outbox = mixed_requests(max_tokens=40), ListOutbox()
    longest = max(len(prompt) for prompt, _ in requests) + 40
    scheduler = make_scheduler(engine, num_pages=longest // engine.page_size + 10)
    drive(engine, requests, scheduler=scheduler, outbox=outbox)
    assert scheduler.stats.num_retractions > 0
    check_logprobs(reference, requests, outbox)


def test_logprobs_of_replayed_steps(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    replay_steps(monkeypatch)
    engine = make_engine(reference, device="cpu", attn="torch", page_size=4)
    try:
        requests, outbox = mixed_requests(), ListOutbox()
        drive(engine, requests, turns=[0, 0, 0, 3, 9, 20], outbox=outbox)
        tops, top_outbox = mixed_requests(top=True), ListOutbox()
        drive(engine, tops, turns=[0, 0, 0, 3, 9, 20], outbox=top_outbox)
        check_logprobs(reference, tops, top_outbox)
        drive(engine, [([1, 2, 3], SamplingParams(max_tokens=3))])
        captured = engine.runner.captured
        shapes = [shape for shape in captured if isinstance(shape, StepShape)]
        assert {shape.has_logprobs for shape in shapes} == {False, True}
        check_logprobs(reference, requests, outbox)
    finally:
        engine.close()


@pytest.mark.parametrize("top", [None, 0])
@pytest.mark.parametrize("num_requests", [1, 8])  # all ranks sample few rows, or each its share
def test_logprobs_of_two_ranks(
    num_requests: int, top: int | None, reference: Reference, tmp_path: Path
) -> None:
    requests = [
        (
            [index + 1] * 5,
            SamplingParams(
                seed=index, max_tokens=9, logprobs=index != 1, top_logprobs=3 if index == top else 0
            ),
        )
        for index in range(num_requests)
    ]
    outboxes = [ListOutbox(), ListOutbox()]
    with engines(reference[0], tmp_path / "store", 2) as ranks:
        assert ranks[0].comm.shares_rows(num_requests) == (num_requests == 8)
        ours, theirs = together(
            lambda engine, outbox: drive(engine, requests, outbox=outbox), ranks, outboxes
        )
    assert ours == theirs
    check_logprobs(reference, requests, outboxes[0])


def test_a_request_without_logprobs_computes_and_downloads_none(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    enqueue = engine.device.enqueue

    def watched(work: Any) -> Any:
        pending = enqueue(work)
        lengths.append(len(pending.wait()))
        return pending

    monkeypatch.setattr(engine.device, "enqueue", watched)
    monkeypatch.setattr(engine._ops, "logprobs", None)
    requests = [
        (prompt, msgspec.structs.replace(sampling, logprobs=False))
        for prompt, sampling in mixed_requests()
    ]
    drive(engine, requests, max_prefill_tokens=4096)
    assert lengths == [len(requests)] * 16


@pytest.mark.parametrize("size", [None, StepSize(8, 0, 0)])
def test_a_step_with_logprobs_uploads_what_one_without_does(size: StepSize | None) -> None:
    plan = make_plan(3, [], last_samples=True)
    without = arrays_of(plan, size)
    plan.logprob_rows = [1]
    with_logprobs = arrays_of(plan, size)
    assert without.keys() == with_logprobs.keys()
    for name, array in without.items():
        assert (with_logprobs[name] == array).all()
