"""`LLM` gives the same answers in float32 with drafts, with its own drafters and an adversary's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.drafted_answers import (
    FREE_ROWS,
    OPTIONS,
    PARAMS,
    PROMPTS,
    eager_llm,
    seen,
    stats_of,
)
from helpers.engine_ranks import engines, together
from helpers.engine_runs import drive, make_scheduler
from minisgl.builtin import model_path
from minisgl.llm import LLM, SamplingParams
from minisgl.llm.engines import OwnEngine
from minisgl.tokenizer import load_tokenizer
from minisgl_zoo.drafts import rule as rule_module


@pytest.fixture(scope="module")
def off() -> Iterator[LLM]:
    with LLM(**OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def eager() -> Iterator[LLM]:
    with eager_llm() as llm:
        yield llm


@pytest.mark.parametrize("name", PARAMS)
def test_answers_are_the_same(off: LLM, eager: LLM, name: str) -> None:
    before = replace(stats_of(eager))
    calls = (PROMPTS, PROMPTS[:1], PROMPTS[3:])
    answers = [off.generate(prompts, PARAMS[name]) for prompts in calls]
    for _ in range(2):  # the second time the prefix tree has the answer
        for prompts, expected in zip(calls, answers, strict=True):
            outputs = eager.generate(prompts, PARAMS[name])
            assert seen(outputs) == seen(expected)
            for one, other in zip(outputs, expected, strict=True):
                assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    after = stats_of(eager)
    assert after.num_accepted > before.num_accepted, "without drafts this test shows nothing"
    assert after.num_steps - before.num_steps < after.num_output_tokens - before.num_output_tokens


def test_all_kinds_of_requests_together_with_choices(off: LLM, eager: LLM) -> None:
    prompts = [prompt for prompt in PROMPTS for _ in PARAMS]
    params = [*PARAMS.values()] * len(PROMPTS)
    expected = off.generate(prompts, params, n=2)
    assert seen(eager.generate(prompts, params, n=2)) == seen(expected)


def test_a_server_of_one_request_has_drafts(off: LLM) -> None:
    with eager_llm(max_running_requests=1) as llm:
        stats = stats_of(llm)
        for name in ("greedy", "hot", "penalties", "schema", "logprobs"):
            before = replace(stats)
            expected = off.generate(PROMPTS[2:], PARAMS[name])
            for _ in range(2):
                assert seen(llm.generate(PROMPTS[2:], PARAMS[name])) == seen(expected), name
            assert stats.num_accepted > before.num_accepted + 15, name
            num_steps = stats.num_steps - before.num_steps
            assert num_steps < stats.num_output_tokens - before.num_output_tokens, name


class _Adversary:
    """Guesses the same token again, and tokens that nobody says."""

    name = "adversary"
    is_over = False
    is_fresh = False

    def __init__(self, *_: object) -> None:
        self._last = 7

    def next(self, count: int) -> list[int]:
        return [self._last, 1, 2, 3, 4, 5, 6, 7][:count]

    def add(self, token: int) -> None:
        self._last = token


@pytest.mark.parametrize("name", ["greedy", "penalties", "words", "schema", "stop"])
def test_an_adversary_changes_nothing(
    off: LLM, eager: LLM, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(eager._engine, OwnEngine)
    drafts: Any = eager._engine.scheduler._drafts
    monkeypatch.setattr(drafts, "_drafters", [_Adversary])
    before = replace(stats_of(eager))
    expected = off.generate(PROMPTS, PARAMS[name])
    assert seen(eager.generate(PROMPTS, PARAMS[name])) == seen(expected)
    after = stats_of(eager)
    rejected = after.num_drafted - before.num_drafted - (after.num_accepted - before.num_accepted)
    assert rejected > 50


def test_two_ranks_have_the_same_drafts(
    off: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rule_module, "LEAST_GAIN", 0.0)
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)  # it repeats itself
    [expected] = off.generate([PROMPTS[3]], params)
    request = (load_tokenizer(model_path()).encode(PROMPTS[3]), params)
    with engines(model_path(), tmp_path / "store", 2, drafts="ngram", num_pages=200) as ranks:
        schedulers = [
            make_scheduler(
                rank,
                vocab_size=rank.model.config.vocab_size,
                drafters=("ngram",),
                step_times=FREE_ROWS,
            )
            for rank in ranks
        ]
        outputs = together(
            lambda rank, each: drive(rank, [request], scheduler=each), ranks, schedulers
        )
        assert outputs == [[expected.token_ids]] * 2
    counts = [(each.stats.num_drafted, each.stats.num_accepted) for each in schedulers]
    assert counts[0] == counts[1]
    assert counts[0][1] > 15
