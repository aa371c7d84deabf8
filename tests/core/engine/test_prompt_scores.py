"""Log-probabilities of prompt tokens: those of transformers' logits, however they are scheduled."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from helpers.engine_ranks import engines, together
from helpers.engine_runs import (
    VOCAB,
    Reference,
    Request,
    drive,
    make_engine,
    make_scheduler,
    prompts,
)
from helpers.packages import HAS_ZOO
from minisgl.core import Finished, SamplingParams, Token
from minisgl.core.event import PromptLogprobs
from minisgl.engine import Engine, prompt_scores
from minisgl_bench.fakes import ListOutbox

TOLERANCE = 1e-4  # of float32 computations in another order


@pytest.fixture(scope="module", params=["torch", "cpu"])
def engine(reference: Reference, request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = make_engine(reference, attn=request.param, page_size=4)
    yield engine
    engine.close()


def longest() -> list[int]:
    return max(prompts(6), key=len)


def mixed_requests(max_tokens: int = 16) -> list[Request]:
    """Two of three ask for the prompt, one of these with three of the most likely tokens; greedy
    and drawn ones, with and without log-probabilities and penalties. The last is one of them again.
    """
    asked = [*prompts(6), [7], longest()]
    return [
        (
            prompt,
            SamplingParams(
                temperature=0.0 if index % 2 else 1.5,
                seed=index,
                max_tokens=max_tokens,
                logprobs=index % 4 > 1,
                presence_penalty=float(HAS_ZOO and index % 5 == 0),
                prompt_logprobs=(None, 0, 3)[index % 3],
            ),
        )
        for index, prompt in enumerate(asked)
    ]


def check(reference: Reference, requests: list[Request], outbox: ListOutbox) -> None:
    for uid, (prompt, sampling) in enumerate(requests):
        events = [e for e in outbox.events if e.uid == uid and isinstance(e, PromptLogprobs)]
        if sampling.prompt_logprobs is None:
            assert not events
            continue
        with torch.inference_mode():
            want_TV = reference[1](torch.tensor([prompt])).logits[0].double().log_softmax(-1)
        got = torch.tensor([x for event in events for x in event.logprobs], dtype=torch.float64)
        want = want_TV[torch.arange(len(prompt) - 1), prompt[1:]]
        assert got.shape == want.shape
        assert torch.allclose(got, want, rtol=0, atol=TOLERANCE)
        tops = [top for event in events for top in event.tops]
        for top, want_V, chosen, logprob in zip(tops, want_TV, prompt[1:], got, strict=False):
            assert len(top) == sampling.prompt_logprobs
            values = torch.tensor([value for _, value in top], dtype=torch.float64)
            ids = [id for id, _ in top]
            assert torch.allclose(values, want_V[ids], rtol=0, atol=TOLERANCE)
            largest = want_V.topk(len(top)).values
            assert torch.allclose(values, largest, rtol=0, atol=TOLERANCE)
            assert all(value == logprob for id, value in top if id == chosen)  # to the last bit
        first_token = next(
            i for i, e in enumerate(outbox.events) if e.uid == uid and isinstance(e, Token)
        )
        assert all(event in outbox.events[:first_token] for event in events)


@pytest.mark.parametrize(("chunk", "overlap"), [(1, True), (7, False), (64, True)])
def test_they_are_those_of_transformers_logits(
    engine: Engine, reference: Reference, chunk: int, overlap: bool
) -> None:
    requests, outbox = mixed_requests(), ListOutbox()
    turns = [0, 1, 2, 5, 5, 5, 5, 40]
    options: dict[str, Any] = {"max_prefill_tokens": chunk, "overlap": overlap}
    drive(engine, requests, turns=turns, outbox=outbox, **options)
    check(reference, requests, outbox)


def test_other_tokens_are_the_same(engine: Engine) -> None:
    requests = mixed_requests()
    without = [
        (prompt, msgspec.structs.replace(sampling, prompt_logprobs=None))
        for prompt, sampling in requests
    ]
    assert drive(engine, requests) == drive(engine, without)


def test_the_prompt_is_computed_whole_and_shared(engine: Engine, reference: Reference) -> None:
    prompt = longest()
    asking = SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=0)
    plain = SamplingParams(temperature=0.0, max_tokens=4)
    scheduler = make_scheduler(engine)
    for uid, (sampling, num_cached) in enumerate(
        [(asking, 0), (asking, 0), (plain, len(prompt) - 1)]
    ):
        outbox = ListOutbox()
        drive(engine, [(prompt, sampling)], scheduler=scheduler, first_uid=uid, outbox=outbox)
        (end,) = [event for event in outbox.events if isinstance(event, Finished)]
        assert end.num_cached_tokens == num_cached - num_cached % 4 <= len(prompt)


def test_of_retracted_requests(engine: Engine, reference: Reference) -> None:
    requests, outbox = mixed_requests(max_tokens=40), ListOutbox()
    longest = max(len(prompt) for prompt, _ in requests) + 40
    scheduler = make_scheduler(engine, num_pages=longest // engine.page_size + 10)
    drive(engine, requests, scheduler=scheduler, outbox=outbox)
    assert scheduler.stats.num_retractions > 0
    check(reference, requests, outbox)


def test_of_two_ranks(reference: Reference, tmp_path: Path) -> None:
    requests, outboxes = mixed_requests(), [ListOutbox(), ListOutbox()]
    with engines(reference[0], tmp_path / "store", 2) as ranks:
        ours, theirs = together(
            lambda engine, outbox: drive(engine, requests, outbox=outbox), ranks, outboxes
        )
    assert ours == theirs
    check(reference, requests, outboxes[0])


def test_logits_of_few_tokens_exist_at_a_time(
    engine: Engine, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    logits = engine.model.logits

    def watched(x_SD: torch.Tensor, shared: bool = False) -> torch.Tensor:
        rows.append(len(x_SD))
        return logits(x_SD, shared)

    monkeypatch.setattr(engine.model, "logits", watched)
    monkeypatch.setattr(prompt_scores, "LOGIT_BYTES", 20 * 4 * VOCAB)
    requests, outbox = mixed_requests(), ListOutbox()
    drive(engine, requests, outbox=outbox, max_prefill_tokens=1024)
    check(reference, requests, outbox)
    assert max(rows) == 20


def test_no_output_at_all(engine: Engine) -> None:
    """The scheduler samples a token, which the detokenizer drops. The context may be full."""
    prompt = [1, 2, 3] * 20
    sampling = SamplingParams(max_tokens=0, prompt_logprobs=20)
    scheduler = make_scheduler(engine, max_seq_len=len(prompt))
    outbox = ListOutbox()
    drive(engine, [(prompt, sampling)], scheduler=scheduler, outbox=outbox)
    kinds = [type(event) for event in outbox.events]
    assert kinds[-2:] == [Token, Finished]
    assert PromptLogprobs in kinds


def test_logits_that_are_not_finite(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        engine.model,
        "logits",
        lambda x_SD, own_rows=False: x_SD.new_full((len(x_SD), VOCAB), torch.nan),
    )
    scheduler, outbox = make_scheduler(engine, max_prefill_tokens=4), ListOutbox()
    with pytest.raises(AssertionError):
        drive(
            engine,
            [([1] * 20, SamplingParams(max_tokens=1, prompt_logprobs=0))],
            scheduler=scheduler,
            outbox=outbox,
        )
    assert [type(event).__name__ for event in outbox.events] == ["Accepted", "Failed"]
