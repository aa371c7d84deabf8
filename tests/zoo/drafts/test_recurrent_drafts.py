"""Drafts of models with recurrent layers: the same ids as without, whoever makes the drafts.

The page guard is on. Answers are longer than an interval of states, and prompts end around its
multiples, so drafts come before, at and behind them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.drafters import KINDS, ScriptedDrafts
from helpers.engine_ranks import engines, together
from helpers.engine_runs import drive, greedy
from helpers.family_cases import SIZES
from helpers.hybrid_cases import HYBRID_CASES
from helpers.model_harness import VOCAB, make_reference, random_ids
from minisgl.core import SamplingParams
from minisgl.core.plan import MOST_DRAFTS
from minisgl.core.req import Req
from minisgl.engine import Engine, EngineConfig
from minisgl.scheduler import Scheduler, SchedulerConfig
from minisgl_zoo.cache_groups.manager import GroupedCacheManager
from minisgl_zoo.recurrent.spec import RecurrentPoolSpec

NUM_TOKENS = 70
LENGTHS = (60, 63, 64, 90)
PARAMS = [
    greedy(NUM_TOKENS),
    SamplingParams(temperature=1.3, top_p=0.9, seed=4, max_tokens=NUM_TOKENS),
    SamplingParams(temperature=0.7, top_k=20, seed=5, max_tokens=NUM_TOKENS),
    SamplingParams(
        temperature=0.0, repetition_penalty=1.1, presence_penalty=0.4, max_tokens=NUM_TOKENS
    ),
]
Requests = list[tuple[list[int], SamplingParams]]
REQUESTS: Requests = [(random_ids(n, n), each) for n, each in zip(LENGTHS, PARAMS, strict=True)]


def make_engine(folder: Path, **options: Any) -> Engine:
    settings: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "page_size": 32,
        "num_pages": 64,
        "max_running_requests": 20,
        "max_prefill_length": 100,
    }
    return Engine(EngineConfig(model=str(folder), **(settings | options)))


@pytest.fixture(scope="module", params=["qwen3.5"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    config_class, changes, _, _ = HYBRID_CASES[request.param]
    sizes = {**SIZES, "max_position_embeddings": 512, **changes}
    make_reference(config_class(**sizes)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    engine = make_engine(folder, drafts="off")
    outputs = drive(engine, REQUESTS, scheduler=scheduler_of(engine))
    follow = follow_up(outputs)
    outputs += drive(engine, follow, scheduler=scheduler_of(engine))
    engine.close()
    return outputs


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINISGL_CHECK_PAGES", "1")
        engine = make_engine(folder, drafts="ngram")
    yield engine
    engine.close()


def follow_up(outputs: Sequence[list[int]]) -> Requests:
    """Prompts that go on where those answers stood when states were written, and off multiples."""
    cuts = (9, NUM_TOKENS, 66, 41)
    return [
        (prompt + output[:cut] + [7], greedy(20))
        for (prompt, _), output, cut in zip(REQUESTS, outputs, cuts, strict=True)
    ]


def scheduler_of(engine: Engine, drafts: ScriptedDrafts | None = None, **options: Any) -> Scheduler:
    config = SchedulerConfig(
        **{
            "groups": engine.memory.groups,
            "page_size": engine.page_size,
            "max_seq_len": engine.max_seq_len,
            "vocab_size": VOCAB,
            "eos_ids": frozenset[int](),
            "max_prefill_tokens": engine.max_prefill_tokens,
            "max_running": engine.max_running,
        }
        | options
    )
    return Scheduler(config, create_drafts=lambda *_: drafts)


def scripted(answers: Sequence[list[int]], kind: str, seed: int = 0) -> ScriptedDrafts:
    drafts = ScriptedDrafts(random.Random(seed), answers, VOCAB, kind)
    drafts._share = 1.0
    return drafts


def check_answers(engine: Engine, expected: list[list[int]], kind: str, chunk: int = 100) -> None:
    """Together, and then from the prefixes that these answers have left in the tree."""
    scheduler = scheduler_of(engine, scripted(expected, kind), max_prefill_tokens=chunk)
    outputs = drive(engine, REQUESTS, turns=[0, 0, 2, 5], scheduler=scheduler)
    assert outputs == expected[: len(REQUESTS)]
    follow = follow_up(outputs)
    outputs = drive(engine, follow, scheduler=scheduler, first_uid=len(REQUESTS))
    assert outputs == expected[len(REQUESTS) :]
    stats = scheduler.stats
    assert stats.num_cached_tokens >= 320
    assert stats.num_retractions == 0
    assert stats.num_drafted > 100
    assert stats.num_accepted > 100 or kind == "never"


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_the_same(engine: Engine, expected: list[list[int]], kind: str) -> None:
    check_answers(engine, expected, kind)


@pytest.mark.parametrize("folder", ["falcon-h1", "nemotron-h", "lfm2"], indirect=True)
def test_answers_of_other_layers_are_the_same(engine: Engine, expected: list[list[int]]) -> None:
    check_answers(engine, expected, "at random", chunk=33)


def test_few_states_retract_and_evict(engine: Engine, expected: list[list[int]]) -> None:
    """Only while so few requests run that each can have its most states, there are drafts."""
    groups = tuple(
        replace(group, num_pages=5) if group.kind == "state" else group
        for group in engine.memory.groups
    )
    drafts = scripted(expected, "every other")
    scheduler = scheduler_of(engine, drafts, groups=groups, watermark_tokens=1)
    assert drive(engine, REQUESTS, scheduler=scheduler) == expected[: len(REQUESTS)]
    assert scheduler.stats.num_retractions == 0
    assert scheduler.stats.num_drafted > 0


def test_the_reference_backend_takes_drafts(folder: Path, expected: list[list[int]]) -> None:
    engine = make_engine(folder, drafts="ngram", attn="torch")
    scheduler = scheduler_of(engine, scripted(expected, "at random"))
    assert drive(engine, REQUESTS[1:2], scheduler=scheduler, first_uid=1) == expected[1:2]
    assert scheduler.stats.num_accepted > 30
    engine.close()


def test_two_ranks(folder: Path, expected: list[list[int]], tmp_path: Path) -> None:
    with engines(folder, tmp_path / "store", 2, drafts="ngram", num_pages=400) as ranks:
        schedulers = [scheduler_of(rank, scripted(expected, "every other")) for rank in ranks]
        outputs = together(
            lambda rank, each: drive(rank, REQUESTS, scheduler=each), ranks, schedulers
        )
    assert outputs == [expected[: len(REQUESTS)]] * 2
    assert schedulers[0].stats.num_accepted == schedulers[1].stats.num_accepted > 50


def test_most_drafts_may_all_be_wrong(folder: Path, expected: list[list[int]]) -> None:
    assert most_wrong(make_engine(folder, drafts="ngram"), expected) == expected[0]


def most_wrong(engine: Engine, expected: list[list[int]]) -> list[int]:
    """The first answer, if the most drafts are computed in each step and all are wrong."""

    def wrong(req: Req) -> list[int]:
        return [(expected[0][len(req.output)] + 1) % VOCAB] * MOST_DRAFTS

    drafts = ScriptedDrafts(random.Random(0), expected, VOCAB, tokens=wrong)
    drafts._share = 1.0
    scheduler = scheduler_of(engine, drafts)
    (output,) = drive(engine, REQUESTS[:1], scheduler=scheduler)
    assert scheduler.stats.num_drafted > 40 * MOST_DRAFTS
    engine.close()
    return output


def test_a_ring_that_is_one_entry_short_is_found(
    folder: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        RecurrentPoolSpec, "with_drafts", lambda self: replace(self, most_false=MOST_DRAFTS - 1)
    )
    assert most_wrong(make_engine(folder, drafts="ngram"), expected) != expected[0]


def test_a_draft_that_ends_an_interval_is_refused(
    engine: Engine, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state would be made of it."""
    monkeypatch.setattr(GroupedCacheManager, "num_free_tokens", lambda *_: MOST_DRAFTS)
    scheduler = scheduler_of(engine, scripted(expected, "always"))
    with pytest.raises(ValueError, match=r"a draft must .* end no interval"):
        drive(engine, REQUESTS[:1], scheduler=scheduler)
