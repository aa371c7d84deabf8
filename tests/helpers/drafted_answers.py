"""Requests of every kind, and an `LLM` that drafts whatever can be guessed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def eager_llm(**options: Any) -> Iterator[LLM]:
    """The cost of a row is nothing, so every guess becomes a draft."""
    with (
        pytest.MonkeyPatch.context() as patch,
        LLM(drafts="grammar,tree,ngram", **(OPTIONS | options)) as llm,
    ):
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
