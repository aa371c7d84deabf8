"""Rows with a mask: the tokens that a masked greedy search over transformers' logits would give."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from helpers.engine_ranks import engines, together
from helpers.engine_runs import (
    Reference,
    Request,
    drive,
    greedy,
    make_engine,
    prompts,
)
from helpers.logprob_checks import check_logprobs
from helpers.masked_runs import (
    NUM_TOKENS,
    allowed_tokens,
    masked_scheduler,
    requests,
)
from helpers.replay import replay_steps
from minisgl.core import SamplingParams
from minisgl.engine import Engine
from minisgl.engine.inputs import StepShape
from minisgl.message import UserMsg, ids_to_bytes
from minisgl_bench.fakes import ListOutbox


@pytest.fixture(scope="module", params=["torch", "cpu"])
def engine(reference: Reference, request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = make_engine(reference, attn=request.param, page_size=4)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def expected(reference: Reference) -> list[list[int]]:
    """No near-tie decides a token: the gaps between the best two allowed logits are checked."""
    outputs = []
    for uid, prompt in enumerate(prompts(6)):
        output: list[int] = []
        for _ in range(NUM_TOKENS):
            with torch.inference_mode():
                logits_V = reference[1](torch.tensor([prompt + output])).logits[0, -1]
            if uid % 3:
                logits_V = logits_V.where(torch.from_numpy(allowed_tokens(output)), -torch.inf)
            best, second = logits_V.topk(2).values.tolist()
            assert best - second > 1e-4, "choose another seed: near-tie"
            output.append(int(logits_V.argmax()))
        outputs.append(output)
    return outputs


@pytest.mark.parametrize("overlap", [True, False])
def test_masked_tokens(engine: Engine, expected: list[list[int]], overlap: bool) -> None:
    scheduler = masked_scheduler(engine)
    turns = [0, 1, 2, 5, 9, 9]
    assert drive(engine, requests(), turns=turns, overlap=overlap, scheduler=scheduler) == expected


def test_masked_tokens_of_retracted_requests(engine: Engine, expected: list[list[int]]) -> None:
    num_pages = sum(len(prompt) for prompt in prompts(6)) // engine.page_size + 8
    scheduler = masked_scheduler(engine, num_pages=num_pages, watermark_tokens=0)
    assert drive(engine, requests(), scheduler=scheduler) == expected
    assert scheduler.stats.num_retractions > 0


def test_masked_rows_decode_once_per_step(engine: Engine) -> None:
    scheduler = masked_scheduler(engine, max_prefill_tokens=4096)
    drive(engine, requests(), scheduler=scheduler)
    assert scheduler.stats.num_steps == NUM_TOKENS


def test_logits_do_not_wait_for_masks(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device computes the LM head of all rows before the step before is settled."""
    num_rows: list[int] = []
    compute = engine.model.logits

    def logits(x_SD: Tensor, own_rows: bool = False) -> Tensor:
        num_rows.append(len(x_SD))
        return compute(x_SD, own_rows)

    monkeypatch.setattr(engine.model, "logits", logits)
    scheduler = masked_scheduler(engine, max_prefill_tokens=4096)
    for uid, (prompt, sampling) in enumerate(requests()):
        scheduler.add(UserMsg(uid=uid, ids=ids_to_bytes(prompt), sampling=sampling))
    plan = scheduler.plan()
    assert plan is not None
    assert 0 < len(plan.late_rows) < len(plan.sample_rows)
    flight = engine.launch(plan)
    engine.synchronize()
    assert num_rows == [len(plan.sample_rows)]
    flight.sample_late(scheduler.masks(plan))
    scheduler.commit(plan, flight.wait())
    assert num_rows == [len(plan.sample_rows)]


def test_masked_tokens_of_replayed_steps(
    reference: Reference, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Late steps have graphs of their own, which end with the forward pass."""
    replay_steps(monkeypatch)
    engine = make_engine(reference, device="cpu", attn="torch", page_size=4)
    try:
        scheduler = masked_scheduler(engine)
        assert drive(engine, requests(), turns=[0, 0, 0, 3, 9, 30], scheduler=scheduler) == expected
        assert drive(engine, requests()[:1], first_uid=6) == expected[:1]
        captured = engine.runner.captured
        shapes = [shape for shape in captured if isinstance(shape, StepShape)]
        assert {shape.samples for shape in shapes} == {False, True}
    finally:
        engine.close()


def test_masks_random_choice_and_logprobs(engine: Engine, reference: Reference) -> None:
    """The log-probabilities are those of the model, without the mask."""
    drawn: list[Request] = [
        (prompt, SamplingParams(top_k=30, min_p=0.01, seed=7, max_tokens=NUM_TOKENS, logprobs=True))
        for prompt in prompts(3)
    ]
    outbox = ListOutbox()
    outputs = drive(engine, drawn, scheduler=masked_scheduler(engine), outbox=outbox)
    for output in outputs[1:]:
        for index, token in enumerate(output):
            assert allowed_tokens(output[:index])[token]
    check_logprobs(reference, drawn, outbox)


@pytest.mark.parametrize("num_requests", [3, 8])  # all ranks sample few rows, or each its share
def test_masks_of_two_ranks(num_requests: int, reference: Reference, tmp_path: Path) -> None:
    many = [([index + 1] * 5, greedy(9)) for index in range(num_requests)]

    def run(engine: Engine) -> list[list[int]]:
        return drive(engine, many, scheduler=masked_scheduler(engine))

    with engines(reference[0], tmp_path / "alone", 1) as alone:
        expected = run(alone[0])
    with engines(reference[0], tmp_path / "two", 2) as ranks:
        assert together(run, ranks) == [expected] * 2
    for uid, output in enumerate(expected):
        checks = [allowed_tokens(output[:i])[token] for i, token in enumerate(output)]
        assert all(checks) == bool(uid % 3)


def test_ranks_that_hang_fail_with_their_stacks() -> None:
    """A hang of the test above was without end: pytest's limit does not end a pool of threads."""
    never = threading.Event()
    with pytest.raises(pytest.fail.Exception, match="1 of 2 ranks hang") as failed:
        together(lambda rank: rank and never.wait(), range(2), timeout_s=0.1)
    assert "rank 1:" in str(failed.value)
    assert "in wait" in str(failed.value)
    never.set()
