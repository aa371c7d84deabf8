"""`LLM` gives the same answers with drafts, with its own drafters and with an adversary's.

Everything is float32. The tests that only compare set the cost of a row to nothing, so that every
guess becomes a draft.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from minisgl.core.step_times import StepTimes
from minisgl.llm import LLM, SamplingParams
from minisgl.llm.engines import OwnEngine
from minisgl.llm.output import RequestOutput
from minisgl.scheduler.requests import SchedulerStats
from minisgl_zoo.drafts import rule as rule_module

OPTIONS: dict[str, Any] = {"dtype": "float32", "progress": False, "num_pages": 1000, "page_size": 4}
FREE_ROWS = StepTimes(prompt_us=((16, 1_000.0),), decode_us=1_000.0)
LIST = "\n".join(f"{number}. {number} times {number} is {number * number}." for number in range(9))
PROMPTS = [
    f"Repeat this list.\n{LIST}",
    "What is a prefix cache?",
    "What is 12 + 30?",
    f"{LIST}\n{LIST}\n",
]
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=60),
    "seeded": SamplingParams(temperature=0.7, seed=3, max_tokens=60),
    "hot": SamplingParams(temperature=1.3, top_p=0.9, seed=4, max_tokens=60),
    "filtered": SamplingParams(temperature=1.0, top_k=20, min_p=0.05, seed=5, max_tokens=60),
    "penalties": SamplingParams(
        temperature=0.0,
        repetition_penalty=1.1,
        frequency_penalty=0.3,
        presence_penalty=0.2,
        min_tokens=30,
        max_tokens=60,
    ),
    "words": SamplingParams(
        temperature=0.0, bad_words=("the", "is"), logit_bias={5: 3.0}, max_tokens=60
    ),
    "stop": SamplingParams(temperature=0.0, stop=(". 4",), max_tokens=60),
    "cut": SamplingParams(temperature=0.0, max_tokens=7),
    "schema": SamplingParams(
        temperature=0.8,
        seed=6,
        max_tokens=80,
        structured_outputs={"json": {"type": "array", "items": {"enum": ["one", "two", "three"]}}},
    ),
    "logprobs": SamplingParams(temperature=0.0, logprobs=True, top_logprobs=3, max_tokens=40),
}


@pytest.fixture(scope="module")
def off() -> Iterator[LLM]:
    with LLM(**OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def eager() -> Iterator[LLM]:
    """It drafts whatever can be guessed."""
    with pytest.MonkeyPatch.context() as patch, LLM(drafts="auto", **OPTIONS) as llm:
        patch.setattr(rule_module, "LEAST_GAIN", 0.0)
        engine = llm._engine
        assert isinstance(engine, OwnEngine)
        drafts: Any = engine.scheduler._drafts
        drafts._times = FREE_ROWS
        yield llm


def stats_of(llm: LLM) -> SchedulerStats:
    assert isinstance(llm._engine, OwnEngine)
    return llm._engine.scheduler.stats


def seen(outputs: list[RequestOutput]) -> list[tuple[object, ...]]:
    return [(each.token_ids, each.text, each.finish_reason) for each in outputs]


@pytest.mark.parametrize("name", PARAMS)
def test_answers_are_the_same(off: LLM, eager: LLM, name: str) -> None:
    before = replace(stats_of(eager))
    for _ in range(2):  # the second time the prefix tree has the answer
        for prompts in (PROMPTS, *([prompt] for prompt in PROMPTS)):
            expected = off.generate(prompts, PARAMS[name])
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


class _Adversary:
    """Guesses the same token again, and tokens that nobody says."""

    name = "adversary"
    is_over = False

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


def test_two_ranks_have_the_same_drafts(off: LLM) -> None:
    params = PARAMS["greedy"]
    expected = off.generate([PROMPTS[3]], params)
    with LLM(drafts="ngram", tp=2, **OPTIONS) as llm:
        for _ in range(2):
            assert seen(llm.generate([PROMPTS[3]], params)) == seen(expected)
