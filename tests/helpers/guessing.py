"""Engines whose checkpoint guesses, and what they guess beside a reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from helpers.engine_runs import greedy, make_engine, make_scheduler
from helpers.model_harness import VOCAB, random_ids
from helpers.predicting import Predicting
from minisgl.core import Plan, SamplingParams, StepOutcome, StepResult
from minisgl.core.plan import Flight
from minisgl.core.req import Mask
from minisgl.core.step_times import StepTimes
from minisgl.engine import Engine
from minisgl.scheduler import Scheduler

FREE_ROWS = StepTimes(prompt_us=((16, 1_000.0),), decode_us=1_000.0)
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "page_size": 4}
LENGTHS = (90, 1, 33, 64)  # the first is computed in chunks
PROMPTS = [random_ids(length, seed=length) for length in LENGTHS]
SAMPLING = {
    "greedy": greedy(24),
    "hot": SamplingParams(temperature=1.3, top_p=0.9, seed=4, max_tokens=24),
    "filtered": SamplingParams(temperature=0.8, top_k=20, min_p=0.05, seed=5, max_tokens=24),
    "penalties": SamplingParams(
        temperature=0.0, repetition_penalty=1.2, presence_penalty=0.4, max_tokens=24
    ),
    "logprobs": SamplingParams(temperature=0.0, logprobs=True, top_logprobs=3, max_tokens=24),
    "scored": SamplingParams(temperature=0.0, prompt_logprobs=2, max_tokens=24),
}


def engine_of(model: Predicting, **options: Any) -> Engine:
    return make_engine((model.folder, model.layers), **OPTIONS | {"drafts": "mtp"} | options)


def scheduler_of(engine: Engine, **options: Any) -> Scheduler:
    is_on = engine.model.mtp is not None
    settings: dict[str, Any] = {"vocab_size": VOCAB, "drafters": ("mtp",) if is_on else ()}
    return make_scheduler(engine, **settings | {"step_times": FREE_ROWS} | options)


@dataclass(slots=True)
class Watched:
    """An engine. Mutable: it keeps the guess behind each position, the last one that was made."""

    engine: Engine
    guesses: dict[tuple[int, int], int] = field(default_factory=dict)

    def launch(self, plan: Plan) -> Flight:
        return _Watched(plan, self.engine.launch(plan), self.guesses)


@dataclass(slots=True)
class _Watched(Flight):
    plan: Plan
    flight: Flight
    guesses: dict[tuple[int, int], int]

    def sample_late(self, masks: Sequence[Mask]) -> None:
        self.flight.sample_late(masks)

    def wait(self) -> StepOutcome:
        result = self.flight.wait()
        assert isinstance(result, StepResult)
        for row, guess in zip(self.plan.sample_rows, result.guesses, strict=True):
            self.guesses[self.plan.uids[row], self.plan.ends[row] - 1] = guess
        return result


def check_guesses(
    model: Predicting, watched: Watched, uid: int, prompt: int, ids: list[int]
) -> int:
    """Compare the guess behind each computed token of the output with the reference's. Returns how
    many there are."""
    logits = model.guess_logits(ids)
    for position in range(prompt - 1, len(ids) - 1):
        row = logits[position]
        first, second = row.topk(2).values
        assert first - second > 1e-4, "the reference nearly ties; take another seed"
        assert watched.guesses[uid, position] == int(row.argmax()), position
    return len(ids) - prompt


def reference_output(model: Predicting, prompt: list[int], output: list[int]) -> list[int]:
    logits = model.logits((prompt + output)[:-1])
    return logits[len(prompt) - 1 :].argmax(-1).tolist()
