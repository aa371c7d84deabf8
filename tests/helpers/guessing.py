"""Engines whose checkpoint guesses, and what they guess beside a reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from helpers.engine_ranks import engines, together
from helpers.engine_runs import drive, greedy, make_engine, make_scheduler
from helpers.model_harness import VOCAB, random_ids
from helpers.predicting import Predicting
from minisgl.core import Plan, SamplingParams, StepOutcome, StepResult
from minisgl.core.plan import Flight
from minisgl.core.req import Mask, Masker
from minisgl.core.step_times import StepTimes
from minisgl.engine import Engine
from minisgl.message import UserMsg
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
            self.guesses[self.plan.uids[row], self.plan.ends[row] - 1] = guess[0]
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


def check_ranks(
    model: Predicting, requests: Sequence[tuple[list[int], SamplingParams]], store: Path
) -> None:
    """Compare the outputs of two ranks, whose guesses are certain, with those without drafts, and
    their counts of drafts with each other's. store: a path that does not exist."""
    alone = engine_of(model, drafts="off")
    expected = drive(alone, requests, scheduler=scheduler_of(alone))
    alone.close()
    with engines(model.folder, store, 2, drafts="mtp", num_pages=400) as ranks:
        schedulers = [scheduler_of(rank) for rank in ranks]
        outputs = together(
            lambda rank, each: drive(rank, requests, scheduler=each), ranks, schedulers
        )
    assert outputs == [expected, expected]
    counts = [(each.stats.num_drafted, each.stats.num_accepted) for each in schedulers]
    assert counts[0] == counts[1]
    assert counts[0][1] >= 16


def check_requests(model: Predicting, *, overlap: bool = True) -> None:
    """Compare outputs and guesses with the reference's: behind chunks, behind a reused prefix,
    behind decodes, and behind drafts, which are all wrong but by chance. A prefix that another
    request continues otherwise is not compared."""
    engine = engine_of(model)
    scheduler = scheduler_of(engine, max_prefill_tokens=16)
    watched: Any = Watched(engine)
    outputs = drive(
        watched,
        [(prompt, greedy(24)) for prompt in PROMPTS],
        turns=[0, 0, 3, 5],
        scheduler=scheduler,
        overlap=overlap,
    )
    checked = 0
    for uid, (prompt, output) in enumerate(zip(PROMPTS, outputs, strict=True)):
        assert output == reference_output(model, prompt, output)
        checked += check_guesses(model, watched, uid, len(prompt), prompt + output)
    again = [PROMPTS[0] + outputs[0][:9], PROMPTS[3] + outputs[3][:1]]
    more = drive(
        watched,
        [(prompt, greedy(8)) for prompt in again],
        scheduler=scheduler,
        overlap=overlap,
        first_uid=4,
    )
    assert scheduler.stats.num_cached_tokens > 100
    for uid, (prompt, output) in enumerate(zip(again, more, strict=True), 4):
        checked += check_guesses(model, watched, uid, len(prompt), prompt + output)
    assert checked == 4 * 24 + 2 * 8
    assert scheduler.stats.num_drafted > 40
    engine.close()


class ThirdMasker:
    """Allows a third of the vocabulary, which depends on the whole output."""

    def mask(self, output: Sequence[int], drafts: Sequence[int] = ()) -> Mask:
        said = [*output, *drafts]
        bits = np.zeros(-(-VOCAB // 32) * 32, np.bool_)
        bits[:VOCAB] = (np.arange(VOCAB) + 5 * sum(said) + len(said)) % 3 == 0
        return np.packbits(bits, bitorder="little").view(np.uint32)

    def forced(self, output: Sequence[int]) -> Sequence[int]:
        return ()


def every_third_token(message: UserMsg) -> Masker | None:
    """Return the masker of two of three requests."""
    return ThirdMasker() if message.uid % 3 else None


def reference_output(model: Predicting, prompt: list[int], output: list[int]) -> list[int]:
    logits = model.logits((prompt + output)[:-1])
    return logits[len(prompt) - 1 :].argmax(-1).tolist()
