"""`minisgl selfcheck` passes, and finds bugs that are planted."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.family_cases import SIZES
from helpers.hybrid_cases import HYBRID_CASES
from helpers.model_harness import make_reference
from helpers.predicting import save_predicting
from minisgl.builtin import model_path
from minisgl.cli import run_command
from minisgl.core import Plan
from minisgl.core.args import EngineConfig
from minisgl.core.req import Req
from minisgl.kvcache.manager import CacheManager
from minisgl.models.blocks.decoder import Decoder
from minisgl.scheduler import drafting
from minisgl_bench.comparer import ROUNDING
from minisgl_bench.selfcheck import Condition, SelfCheck
from minisgl_zoo.cache_groups.manager import GroupedCacheManager


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with recurrent layers and the tokenizer of the built-in model."""
    folder = tmp_path_factory.mktemp("hybrid")
    kind, values, *_ = HYBRID_CASES["qwen3.5"]
    config = kind(**{**SIZES, **values, "max_position_embeddings": 512})
    make_reference(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_path() / name, folder)
    return folder


def check(num_requests: int = 8, num_tokens: int = 20, **options: Any) -> dict[str, Condition]:
    args = EngineConfig(dtype="float32", **options)
    lines: list[str] = []
    checked = SelfCheck(
        args, num_requests=num_requests, num_tokens=num_tokens, batches=(4,), say=lines.append
    )
    conditions = {condition.name: condition for condition in checked.run()}
    assert lines[:4] == [str(condition) for condition in conditions.values()][:4]
    return conditions


def test_the_builtin_model_passes() -> None:
    conditions = check()
    assert list(conditions) == [
        "again",
        "cached",
        "in batches of 4",
        "beside aborts",
        "without overlap",
        "in chunks",
        "retracted",
        "with drafts",
    ]
    for condition in conditions.values():
        assert not condition.differs, str(condition)
        assert condition.num_requests == 8
        assert condition.num_tokens + 20 * len(condition.ties) >= 160
    assert ", 0 tokens" not in conditions["cached"].note
    assert ", 0 requests" not in conditions["beside aborts"].note
    assert ", 0 retractions" not in conditions["retracted"].note
    assert int(conditions["with drafts"].note.split()[1]) > 20


def test_a_model_that_predicts_its_next_tokens_passes(tmp_path: Path) -> None:
    """With its own layer as the drafter, also beside retractions. Each guess is right."""
    save_predicting(tmp_path, "qwen3.5", is_certain=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_path() / name, tmp_path)
    conditions = check(model=str(tmp_path), drafts="mtp", max_seq_len=128)
    assert not any(condition.differs for condition in conditions.values())
    right, drafted = map(int, re.findall(r"\d+", conditions["with drafts"].note))
    assert right == drafted > 100


def as_if_a_key_were_rounded(logits: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A batch of several rows has other logits, by as much as a key of 8 bits that differs in its
    last bit may cause. Whether a CPU's order of sums causes that is chance."""

    def planted(self: Decoder, x_SD: torch.Tensor, shared: bool = False) -> torch.Tensor:
        logits_SV = logits(self, x_SD, shared)
        noise_V = torch.linspace(-1, 1, logits_SV.shape[-1]).sin()
        return logits_SV + (0.02 * noise_V if logits_SV.shape[0] > 1 else 0)

    return planted


@pytest.mark.parametrize(("kv_cache_dtype", "differs"), [("fp8", False), ("auto", True)])
def test_a_cache_of_8_bits_may_round_a_key_to_the_next_number(
    kv_cache_dtype: str, differs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SelfCheck, "_of_another_engine", lambda *_: Condition(name="left out"))
    monkeypatch.setattr(Decoder, "logits", as_if_a_key_were_rounded(Decoder.logits))
    conditions = check(num_requests=6, num_tokens=10, kv_cache_dtype=kv_cache_dtype)
    assert bool(conditions["in batches of 4"].differences) == differs
    assert conditions["in batches of 4"].max_drift > 2 * ROUNDING["float32"]


def test_the_reference_prefers_its_own_token_to_any_other() -> None:
    """Also to one that is not among the likeliest, and of a seeded request with its noise."""
    checked = SelfCheck(EngineConfig(dtype="float32"), num_requests=2, num_tokens=20)
    with checked._llm() as llm:
        for request in range(2):
            ids = checked._ask(llm, [request], "")[0].token_ids
            others = [7, 300, 1400]
            scores = checked._scores(llm, request, ids[:5], [ids[5], *others])
            assert all(scores[ids[5]] > scores[other] for other in others if other != ids[5])


def wrong_page(extend: Callable[..., bool]) -> Callable[..., bool]:
    """In a step with new pages for two requests, one writes into the other's page."""

    def planted(self: CacheManager, req: Any, start: int, end: int, new_pages: list[Any]) -> bool:
        done = extend(self, req, start, end, new_pages)
        if done and new_pages and new_pages[-1].table_idx != new_pages[0].table_idx:
            new_pages[-1].pages[-1] = new_pages[0].pages[0]
        return done

    return planted


def stale_prefix(attach: Callable[..., Any]) -> Callable[..., Any]:
    """A request finds the prefix of another prompt of its namespace."""
    last: dict[str, Any] = {}

    def planted(self: CacheManager, req: Any, ids: Any, step: int) -> Any:
        other = last.setdefault(req.namespace, ids)
        if len(other) < len(ids):
            last[req.namespace] = other = ids
        return attach(self, req, other[: len(ids)], step)

    return planted


def stale_state(list_pages: Callable[..., None]) -> Callable[..., None]:
    """A request that resumes at a state reads the first state that any request resumed at."""
    first: dict[int, int] = {}

    def planted(self: GroupedCacheManager, req: Any, new_pages: list[Any]) -> None:
        start = len(new_pages)
        list_pages(self, req, new_pages)
        states = {tail.index for tail in self._tails if tail.group.kind == "state"}
        for run in new_pages[start:]:
            if run.group in states:
                run.pages[:] = [first.setdefault(run.group, page) for page in run.pages]

    return planted


def batch_dependent(logits: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def planted(self: Decoder, x_SD: torch.Tensor, shared: bool = False) -> torch.Tensor:
        logits_SV = logits(self, x_SD, shared)
        noise_V = torch.linspace(-1, 1, logits_SV.shape[-1]).sin()
        return logits_SV + 0.01 * (logits_SV.shape[0] - 1) * noise_V

    return planted


@pytest.mark.parametrize(
    ("options", "is_compared"),
    [({"tp": 2}, True), ({"tp": 2, "dummy_weight": True}, False), ({}, False)],
)
def test_ranks_are_compared_with_one_rank_of_the_same_model(
    options: dict[str, Any], is_compared: bool
) -> None:
    """Random weights depend on the number of ranks."""
    engines = SelfCheck(EngineConfig(**options))._other_engines()
    assert ("on one rank" in engines) == is_compared


@pytest.mark.parametrize(
    ("owner", "name", "plant", "found_by"),
    [
        (CacheManager, "extend", wrong_page, "in batches of 4"),
        (CacheManager, "attach", stale_prefix, "cached"),
        (Decoder, "logits", batch_dependent, "in batches of 4"),
    ],
)
def test_planted_bugs_are_found(
    owner: type, name: str, plant: Any, found_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, plant(getattr(owner, name)))
    monkeypatch.setattr(SelfCheck, "_of_another_engine", lambda *_: Condition(name="left out"))
    conditions = check(num_requests=6, num_tokens=10)
    found = conditions[found_by]
    assert found.differences or found.failure
    assert re.search("DIFFERENT|FAILED", str(found))
    assert not conditions["again"].differs


def test_drafts_that_are_accepted_without_a_look_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def accept_all(req: Req, plan: Plan, index: int, unmasked: object) -> bool:
        req.num_computed += not req.ended
        req.num_known += not req.ended
        return not req.ended

    engines = SelfCheck._other_engines

    def only_drafts(self: SelfCheck) -> dict[str, dict[str, Any]]:
        return {"with drafts": engines(self)["with drafts"]}

    monkeypatch.setattr(drafting, "accept", accept_all)
    monkeypatch.setattr(SelfCheck, "_other_engines", only_drafts)
    conditions = check(num_requests=6, num_tokens=40)
    assert conditions["with drafts"].differences
    assert not conditions["cached"].differs


def test_a_planted_stale_state_is_found(hybrid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SelfCheck, "_of_another_engine", lambda *_: Condition(name="left out"))
    sound = check(model=str(hybrid))
    assert ", 0 tokens" not in sound["cached"].note
    assert not any(condition.differs for condition in sound.values())
    planted = stale_state(GroupedCacheManager.list_pages)
    monkeypatch.setattr(GroupedCacheManager, "list_pages", planted)
    conditions = check(model=str(hybrid))
    assert conditions["cached"].differences
    assert not conditions["again"].differs


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["selfcheck", "/no/such/model"], time.monotonic()) == 1
    assert "there is no folder /no/such/model" in capsys.readouterr().err
