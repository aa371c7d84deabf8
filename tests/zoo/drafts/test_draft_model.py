"""Drafts from a small model beside the served one, float32 on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import replace as changed
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from transformers import LlamaConfig, MistralConfig, PreTrainedModel, Qwen3Config

from helpers.books import check_books
from helpers.drafted_answers import OPTIONS, PARAMS, seen, stats_of
from helpers.drafted_answers import PROMPTS as TEXTS
from helpers.engine_ranks import engines, together
from helpers.engine_runs import drive, greedy, make_engine, make_scheduler
from helpers.guessing import FREE_ROWS, PROMPTS, SAMPLING, every_third_token
from helpers.model_harness import VOCAB, make_reference
from helpers.predicting import HYBRIDS
from minisgl.builtin import model_path
from minisgl.core import Failed, Plan, StepOutcome, StepResult, Token
from minisgl.core.args import EngineConfig
from minisgl.core.plan import Begin, Flight
from minisgl.engine import Engine
from minisgl.errors import ConfigError
from minisgl.llm import LLM
from minisgl.message import AbortMsg, SchedulerMsg, UserMsg, ids_to_bytes
from minisgl.scheduler import Scheduler
from minisgl.scheduler import run as run_loop
from minisgl.scheduler.drafting import draft_rows
from minisgl_bench.fakes import ListInbox, ListOutbox
from minisgl_zoo.drafts import rule as rule_module
from minisgl_zoo.drafts.draft_model import MOST_GUESSES, PROBE, ModelGuesser
from minisgl_zoo.drafts.rule import Rate

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


@pytest.fixture(autouse=True)
def drafts_whatever_is_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule_module, "LEAST_GAIN", 0.0)
    monkeypatch.setattr(ModelGuesser, "_count", lambda _, num_rows: num_rows and MOST_GUESSES)


COUNT = ModelGuesser._count


@dataclass(frozen=True, kw_only=True)
class Pair:
    served: Path
    draft: Path
    model: PreTrainedModel  # the draft model


def save_pair(folder: Path, kind: str) -> Pair:
    """kind: how the draft model's guesses are: "right", "near" (often right) or "other"."""
    served = make_reference(Qwen3Config(**SIZES, head_dim=12, tie_word_embeddings=True), seed=1)
    served.save_pretrained(folder / "served")
    draft = served
    if kind == "near":
        with torch.no_grad():
            for weight in draft.parameters():
                weight += 0.05 * weight.std() * torch.randn_like(weight)
    elif kind == "other":
        draft = make_reference(LlamaConfig(**SIZES), seed=2)
    draft.save_pretrained(folder / "draft")
    return Pair(served=folder / "served", draft=folder / "draft", model=draft)


@pytest.fixture(scope="module", params=["right", "near", "other"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return save_pair(tmp_path_factory.mktemp(request.param), request.param)


def engine_of(pair: Pair, **options: Any) -> Engine:
    common = {"device": "cpu", "dtype": "float32", "page_size": 4, "draft_model": str(pair.draft)}
    return make_engine((pair.served, pair.model), **common | options)


def scheduler_of(engine: Engine, **options: Any) -> Scheduler:
    drafters = ("draft",) if engine._guesser else ()
    settings: dict[str, Any] = {"vocab_size": VOCAB, "drafters": drafters}
    return make_scheduler(engine, **settings | {"step_times": FREE_ROWS} | options)


@pytest.fixture(scope="module")
def both(pair: Pair) -> Iterator[tuple[Engine, Engine]]:
    """Engines without and with the draft model."""
    off, on = engine_of(pair, draft_model=None), engine_of(pair)
    yield off, on
    off.close()
    on.close()


# Guesses that are all right, or all wrong, meet fewer kinds of requests.
ASKED = [
    *(("near", name) for name in SAMPLING),
    *(("right", name) for name in ("greedy", "filtered", "scored")),
    *(("other", name) for name in ("greedy", "penalties", "logprobs")),
]


@pytest.mark.parametrize(("pair", "name"), ASKED, indirect=["pair"], scope="module")
def test_answers_are_the_same(both: tuple[Engine, Engine], name: str) -> None:
    off, on = both
    requests = [(prompt, replace(SAMPLING[name], max_tokens=30)) for prompt in PROMPTS]
    turns = [0, 1, 2, 6]
    expected = drive(off, requests, turns=turns, scheduler=scheduler_of(off))
    scheduler = scheduler_of(on)
    assert drive(on, requests, turns=turns, scheduler=scheduler) == expected
    again = scheduler_of(on, max_prefill_tokens=16)  # in chunks
    assert drive(on, requests, scheduler=again, overlap=False) == expected
    assert drive(on, requests, scheduler=again, first_uid=4) == expected  # prefix hits
    assert again.stats.num_cached_tokens > (0 if name == "scored" else 100) - 1
    assert scheduler.stats.num_drafted > 20


def test_guesses_with_the_noise_of_the_tokens_are_right(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    pair = save_pair(tmp_path_factory.mktemp("same"), "right")
    engine = engine_of(pair)
    for name in ("greedy", "hot", "filtered"):
        scheduler = scheduler_of(engine)
        requests = [(prompt, replace(SAMPLING[name], max_tokens=40)) for prompt in PROMPTS]
        drive(engine, requests, scheduler=scheduler)
        stats = scheduler.stats
        assert stats.num_accepted > 0.95 * stats.num_drafted > 80
        assert stats.num_steps < 45, "several tokens a step"
    engine.close()


@dataclass(slots=True)
class Watched:
    """An engine that compares the guesses of each step with the draft model of transformers.
    Mutable: it knows the tokens of each request, and counts."""

    engine: Engine
    model: PreTrainedModel
    known: dict[int, list[int]]
    num_checked: int = 0

    def launch(self, plan: Plan) -> Flight:
        return _Watched(plan, self.engine.launch(plan), self)


@dataclass(slots=True)
class _Watched(Flight):
    plan: Plan
    flight: Flight
    by: Watched

    def sample_late(self, masks: Any) -> None:
        self.flight.sample_late(masks)

    def wait(self) -> StepOutcome:
        result = self.flight.wait()
        assert isinstance(result, StepResult)
        drafts = draft_rows(self.plan)
        rows = zip(self.plan.sample_rows, result.next_ids, result.guesses, strict=True)
        for row, token, guesses in rows:
            known, end = self.by.known[self.plan.uids[row]], self.plan.ends[row]
            if row in drafts and (len(known), known[-1]) != (end, self.plan.token_ids[row]):
                continue  # wrong, or behind a wrong one
            assert len(known) == end
            known.append(token)
            self.check(known, guesses)
        return result

    def check(self, known: list[int], guesses: list[int]) -> None:
        guesses = guesses[: guesses.index(-1)] if -1 in guesses else guesses
        if not guesses:
            return
        logits = self.by.model(torch.tensor([[*known, *guesses[:-1]]])).logits[0]
        for guess, row in zip(guesses, logits[len(known) - 1 :], strict=True):
            first, second = row.topk(2).values
            if first - second < 1e-4:  # nearly a tie
                return
            assert guess == int(row.argmax())
            self.by.num_checked += 1


@torch.no_grad()
@pytest.mark.parametrize(("attn", "kind"), [("auto", "near"), ("torch", "near"), ("auto", "other")])
def test_guesses_are_the_draft_models_own(
    attn: str, kind: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Behind chunks, prefix hits, decodes and drafts."""
    pair = save_pair(tmp_path_factory.mktemp(kind), kind)
    engine = engine_of(pair, attn=attn)
    scheduler = scheduler_of(engine, max_prefill_tokens=16)
    for first_uid in (0, 4):
        known = {first_uid + index: list(prompt) for index, prompt in enumerate(PROMPTS)}
        watched: Any = Watched(engine, pair.model, known)
        requests = [(prompt, greedy(20)) for prompt in PROMPTS]
        drive(
            watched, requests, turns=[0, 0, 3, 5], scheduler=scheduler, overlap=False,
            first_uid=first_uid,
        )  # fmt: skip
        assert watched.num_checked > 60
    assert scheduler.stats.num_cached_tokens > 100
    engine.close()


def test_masked_rows_have_guesses_too(both: tuple[Engine, Engine]) -> None:
    outputs = []
    for engine in both:
        scheduler = scheduler_of(engine)
        scheduler._create_masker = every_third_token
        requests = [(prompt, greedy(24)) for prompt in PROMPTS]
        outputs.append(drive(engine, requests, turns=[0, 1, 2, 6], scheduler=scheduler))
    assert outputs[0] == outputs[1]
    assert scheduler.stats.num_drafted > 10


def test_retracted_requests_go_on_as_they_would(both: tuple[Engine, Engine]) -> None:
    """The pool has half of the pages that they need together."""
    off, on = both
    requests = [(prompt, greedy(40)) for prompt in PROMPTS]
    expected = drive(off, requests, scheduler=scheduler_of(off))
    scheduler = scheduler_of(on, num_pages=60, groups=(), watermark_tokens=0)
    assert drive(on, requests, scheduler=scheduler) == expected
    assert scheduler.stats.num_retractions > 0
    assert scheduler.stats.num_drafted > 10


def test_a_failed_step_is_computed_again(
    both: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fourth step fails an allocation, after the served model has sampled."""
    off, on = both
    requests = [(prompt, greedy(30)) for prompt in PROMPTS]
    expected = drive(off, requests, scheduler=scheduler_of(off))
    run, calls = ModelGuesser._run, []

    def failing(guesser: ModelGuesser, *args: Any) -> None:
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        run(guesser, *args)

    monkeypatch.setattr(ModelGuesser, "_run", failing)
    messages: list[SchedulerMsg] = [
        UserMsg(uid=uid, ids=ids_to_bytes(prompt), sampling=sampling)
        for uid, (prompt, sampling) in enumerate(requests)
    ]
    scheduler, outbox = scheduler_of(on), ListOutbox()
    inbox = ListInbox([messages], more=lambda: [] if scheduler.runnable else None)
    run_loop(scheduler, on, inbox, outbox)
    failed = {event.uid for event in outbox.events if isinstance(event, Failed)}
    assert len(failed) == 1, "the newest"
    for uid in set(range(len(requests))) - failed:
        got = [each.id for each in outbox.events if isinstance(each, Token) and each.uid == uid]
        assert got == expected[uid]


def test_others_go_on_behind_an_aborted_request(both: tuple[Engine, Engine]) -> None:
    """A later request gets its pages and its row of the tables."""
    off, on = both
    requests = [(prompt, greedy(30)) for prompt in PROMPTS]
    expected = drive(off, requests, scheduler=scheduler_of(off, max_running=3))
    messages = [
        UserMsg(uid=uid, ids=ids_to_bytes(prompt), sampling=sampling)
        for uid, (prompt, sampling) in enumerate(requests)
    ]
    turns: list[list[SchedulerMsg]] = [[] for _ in range(7)]
    turns[0], turns[6] = [*messages], [AbortMsg(uid=0)]
    scheduler, outbox = scheduler_of(on, max_running=3), ListOutbox()
    run_loop(
        scheduler, on, ListInbox(turns, more=lambda: [] if scheduler.runnable else None), outbox
    )
    check_books(scheduler)
    assert not scheduler.requests.by_uid
    for uid in (1, 2, 3):
        got = [each.id for each in outbox.events if isinstance(each, Token) and each.uid == uid]
        assert got == expected[uid]


def test_two_ranks_guess_as_one_does(tmp_path: Path) -> None:
    pair = save_pair(tmp_path, "near")
    requests = [(prompt, SAMPLING[name]) for prompt in PROMPTS for name in ("greedy", "hot")]
    off = engine_of(pair, draft_model=None)
    expected = drive(off, requests, scheduler=scheduler_of(off))
    off.close()
    options = {"draft_model": str(pair.draft), "num_pages": 400}
    with engines(pair.served, tmp_path / "store", 2, **options) as ranks:
        schedulers = [scheduler_of(rank) for rank in ranks]
        outputs = together(
            lambda rank, each: drive(rank, requests, scheduler=each), ranks, schedulers
        )
    assert outputs == [expected, expected]
    counts = [(each.stats.num_drafted, each.stats.num_accepted) for each in schedulers]
    assert counts[0] == counts[1]
    assert counts[0][0] > 20


def test_a_hybrid_has_a_draft_model(tmp_path: Path) -> None:
    pair = save_pair(tmp_path / "pair", "other")
    kind, values = HYBRIDS["qwen3.5"]
    config = kind(**{**SIZES, **values, "num_hidden_layers": 4, "vocab_size": VOCAB})
    served = make_reference(config)
    served.save_pretrained(tmp_path / "hybrid")
    hybrid = changed(pair, served=tmp_path / "hybrid")
    requests = [(prompt, greedy(30)) for prompt in PROMPTS]
    off = engine_of(hybrid, draft_model=None, page_size=16, max_seq_len=256)
    expected = drive(off, requests, scheduler=scheduler_of(off))
    off.close()
    on = engine_of(hybrid, page_size=16, max_seq_len=256)
    scheduler = scheduler_of(on)
    assert drive(on, requests, scheduler=scheduler) == expected
    assert drive(on, requests, scheduler=scheduler, first_uid=4) == expected
    assert scheduler.stats.num_drafted > 10
    on.close()


def test_no_position_is_beyond_the_context(pair: Pair) -> None:
    """The last tokens of the longest request have no guesses."""
    on, off = engine_of(pair, max_seq_len=64), engine_of(pair, max_seq_len=64, draft_model=None)
    requests = [(PROMPTS[2], greedy(64 - len(PROMPTS[2])))]
    expected = drive(off, requests, scheduler=scheduler_of(off))
    assert drive(on, requests, scheduler=scheduler_of(on)) == expected
    on.close()
    off.close()


def new_guesser(cost: float = 0.1) -> ModelGuesser:
    none: Any = None
    return ModelGuesser(
        model=none, contexts=[], comm=none, ops=none, page_size=4, num_pages=1, max_seq_len=64,
        vocab_size=9, cost=cost,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("rate", "cost", "least", "most"),
    [(0.9, 0.05, 6, MOST_GUESSES), (0.6, 0.2, 1, 3), (0.3, 0.6, 0, 0), (0.0, 0.05, 0, 0)],
)
def test_guesses_are_made_where_they_pay(rate: float, cost: float, least: int, most: int) -> None:
    guesser = new_guesser(cost)
    for each in guesser.rates:
        each.right, each.count = 100 * rate, 100.0
    counts = [COUNT(guesser, 1) for _ in range(4 * PROBE)]
    assert least <= sorted(counts)[2 * PROBE] <= most
    assert sum(counts) >= 4, "some are made where none pays, to notice a change"
    assert COUNT(guesser, 0) == COUNT(guesser, 33) == 0, "of many requests none is followed"


def test_a_draft_behind_a_wrong_one_is_none_of_the_known_tokens() -> None:
    """Even if it is what the row before the wrong one has sampled."""
    plan = Plan(
        step=0,
        uids=[0, 1, 0, 0, 1],
        table_idxs=[3, 5, 3, 3, 5],
        starts=[8, 2, 9, 10, 3],
        ends=[9, 3, 10, 11, 4],
        token_ids=np.array([20, 30, 21, 22, 31], np.int32),
        num_decodes=5,
        num_drafts=3,
        sample_rows=[0, 1, 2, 3, 4],
        output_idxs=[1, 1, 2, 3, 2],
    )
    wrong, right = new_guesser()._spans(plan, np.arange(5), [22, 31, 23, 24, 32])
    assert (wrong.tokens, wrong.slots, wrong.index, wrong.sampled) == ([20], [0], 0, 22)
    assert (right.tokens, right.slots, right.index, right.sampled) == ([30, 31], [1, 4], 4, 32)


@pytest.mark.parametrize("begins", [False, True])
def test_guesses_are_not_compared_with_the_next_request_of_the_row(
    begins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which may go on where they would."""
    guesser = new_guesser()
    monkeypatch.setattr(ModelGuesser, "_run", lambda *_: None)
    guesser.chains[3] = 9, [20, 21]
    plan = Plan(
        step=0,
        uids=[7],
        table_idxs=[3],
        starts=[8],
        ends=[9],
        token_ids=np.array([19], np.int32),
        num_decodes=1,
        sample_rows=[0],
        output_idxs=[0],
        begins=[Begin(3, greedy(9))] if begins else [],
    )
    inputs: Any = SimpleNamespace(plan=plan, forward={"slots": np.zeros((1, 1), np.int32)})
    none: Any = None
    guesser.guess(none, torch.tensor([20]), inputs)
    assert (guesser.rates[0].count > Rate().count) is not begins


def test_the_built_in_model_drafts_for_itself() -> None:
    """Its guesses see no penalties, biases or masks."""
    with LLM(**OPTIONS) as off, LLM(draft_model=model_path(), **OPTIONS) as on:
        stats = stats_of(on)
        for name in ("seeded", "logprobs", "penalties", "words", "schema"):
            expected = off.generate(TEXTS[:2], PARAMS[name])
            assert seen(on.generate(TEXTS[:2], PARAMS[name])) == seen(expected)
            if name == "logprobs":
                assert stats.drafted_by.keys() == {"draft"}
                assert stats.num_accepted > 0.9 * stats.num_drafted > 45
                assert stats.num_steps < 0.3 * stats.num_output_tokens


def test_pairs_that_cannot_work_are_refused(tmp_path: Path) -> None:
    pair = save_pair(tmp_path, "other")
    short, windows, words = tmp_path / "short", tmp_path / "windows", tmp_path / "words"
    make_reference(LlamaConfig(**SIZES | {"max_position_embeddings": 100})).save_pretrained(short)
    make_reference(MistralConfig(**SIZES, sliding_window=16)).save_pretrained(windows)
    make_reference(LlamaConfig(**SIZES | {"vocab_size": 99})).save_pretrained(words)
    for folder, says in (
        (short, "was made for 100 tokens"),
        (windows, "full attention only"),
        (words, "another vocabulary"),
    ):
        with pytest.raises(ConfigError, match=says) as refused:
            engine_of(pair, draft_model=str(folder))
        assert str(refused.value).startswith("the draft model (--draft-model)")
        assert str(tmp_path) not in str(refused.value)  # the user may have named an id
    with pytest.raises(ConfigError, match="add --draft-model"):
        EngineConfig(drafts="ngram,draft")
    with pytest.raises(ConfigError, match="does not go with --drafts mtp"):
        EngineConfig(drafts="mtp", draft_model="x")
    assert EngineConfig(drafts="off", draft_model="x").draft_names == "draft"
    assert EngineConfig(drafts="auto", draft_model="x").draft_names == "auto,draft"


def test_the_memory_of_the_draft_model_counts(pair: Pair) -> None:
    on, off = engine_of(pair), engine_of(pair, draft_model=None)
    assert on.memory.weight_bytes > off.memory.weight_bytes
    assert on.memory.group_page_bytes[0] > off.memory.group_page_bytes[0]
    on.close()
    off.close()
