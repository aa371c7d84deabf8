"""Drafts on a GPU change no answer: in float32 each id is that without drafts."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.drafted_answers import OPTIONS, PARAMS, PROMPTS, eager_llm, seen, stats_of
from helpers.drafters import KINDS, ScriptedDrafts
from helpers.engine_runs import VOCAB, Request, drive, greedy, make_scheduler, prompts
from helpers.engine_runs import save_reference as save_tiny
from helpers.family_cases import CASES, save_case
from helpers.masked_runs import create_masker
from minisgl.builtin import model_path
from minisgl.core import SamplingParams
from minisgl.engine import Engine, EngineConfig
from minisgl.engine.startup import start_engine
from minisgl.errors import ConfigError
from minisgl.llm import LLM
from minisgl.scheduler import Scheduler

TURNS = [0, 3, 9, 9, 12, 14]


def requests() -> list[Request]:
    asked = [
        greedy(48),
        SamplingParams(temperature=0.8, seed=1, max_tokens=48, top_k=20),
        SamplingParams(temperature=1.2, seed=2, max_tokens=48, top_p=0.9, min_p=0.01),
        SamplingParams(
            temperature=0.0,
            max_tokens=48,
            frequency_penalty=0.5,
            presence_penalty=0.3,
            repetition_penalty=1.2,
        ),
        SamplingParams(temperature=0.0, max_tokens=48, logit_bias={7: 2.0}, logprobs=True),
        greedy(5),
    ]
    return list(zip(prompts(6), asked, strict=True))


def drafted(
    engine: Engine,
    asked: list[Request],
    answers: list[list[int]],
    kind: str,
    vocab_size: int,
    masked: bool = False,
    **options: Any,
) -> tuple[list[list[int]], Scheduler]:
    """Return the ids with scripted drafts, and the scheduler."""
    config = make_scheduler(engine, vocab_size=vocab_size).config
    scheduler = Scheduler(
        config,
        create_masker=create_masker if masked else None,
        create_drafts=lambda *_: ScriptedDrafts(random.Random(0), answers, vocab_size, kind),
    )
    return drive(engine, asked, scheduler=scheduler, **options), scheduler


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("qwen3"))[0]


@pytest.mark.parametrize("graphs", [0, 16])
@pytest.mark.parametrize("attn", ["triton", "torch"])
@pytest.mark.parametrize("masked", [False, True])
def test_scripted_drafts_change_no_answer(tiny: Path, attn: str, graphs: int, masked: bool) -> None:
    engine = start_engine(
        EngineConfig(
            model=str(tiny),
            device="cuda",
            attn=attn,
            dtype="float32",
            cuda_graph_max_bs=graphs,
            num_pages=256,
            max_running_requests=32,
            max_prefill_length=64,
        )
    )
    try:
        plain = Scheduler(
            make_scheduler(engine).config, create_masker=create_masker if masked else None
        )
        answers = drive(engine, requests(), scheduler=plain, turns=TURNS)
        for kind in KINDS:
            for overlap in (True, False):
                got, scheduler = drafted(
                    engine,
                    requests(),
                    answers,
                    kind,
                    VOCAB,
                    masked=masked,
                    turns=TURNS,
                    overlap=overlap,
                )
                assert got == answers
                stats = scheduler.stats
                assert stats.num_drafted > 20
                assert (stats.num_accepted > 0) == (kind != "never")
    finally:
        engine.close()


@pytest.mark.parametrize("name", CASES)
def test_drafts_change_no_answer_of_any_family(name: str, tmp_path: Path) -> None:
    reference, page_size = save_case(name, tmp_path)
    vocab_size = reference.config.get_text_config().vocab_size
    engine = start_engine(
        EngineConfig(
            model=str(tmp_path),
            device="cuda",
            dtype="float32",
            num_pages=512,
            page_size=page_size,
            max_running_requests=32,
            max_prefill_length=64,
        )
    )
    try:
        if any(group.interval for group in engine.memory.groups):
            pytest.skip("a model with recurrent layers has no drafts")
        generator = torch.Generator().manual_seed(3)
        half = min(30, engine.max_seq_len // 2)
        asked = [
            (torch.randint(0, vocab_size, (length,), generator=generator).tolist(), sampling)
            for length, sampling in (
                (half, greedy(half)),
                (half - 2, SamplingParams(temperature=0.9, seed=4, max_tokens=half)),
                (half // 2, greedy(half)),
            )
        ]
        answers = drive(engine, asked, vocab_size=vocab_size)
        for kind in ("always", "at random"):
            got, scheduler = drafted(engine, asked, answers, kind, vocab_size)
            assert got == answers
            assert scheduler.stats.num_accepted > 10
    finally:
        engine.close()


@pytest.fixture(scope="module")
def off() -> Iterator[LLM]:
    with LLM(device="cuda", **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def eager() -> Iterator[LLM]:
    with eager_llm(device="cuda") as llm:
        yield llm


@pytest.mark.parametrize("name", PARAMS)
def test_answers_of_an_llm_are_the_same(off: LLM, eager: LLM, name: str) -> None:
    before = replace(stats_of(eager))
    for _ in range(2):  # the second time the prefix tree has the answer
        expected = off.generate(PROMPTS, PARAMS[name])
        outputs = eager.generate(PROMPTS, PARAMS[name])
        assert seen(outputs) == seen(expected)
        for one, other in zip(outputs, expected, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    assert stats_of(eager).num_accepted > before.num_accepted


def test_two_gpus_have_the_same_drafts(off: LLM) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    params = PARAMS["greedy"]
    expected = seen(off.generate(PROMPTS, params))
    with LLM(drafts="tree,ngram", device="cuda", tp=2, **OPTIONS) as llm:
        for _ in range(2):
            assert seen(llm.generate(PROMPTS, params)) == expected


def test_a_model_with_recurrent_layers_refuses_drafts(tmp_path: Path) -> None:
    save_case("qwen3.5", tmp_path)
    for path in model_path().glob("*token*"):
        shutil.copy(path, tmp_path)
    with pytest.raises(ConfigError, match="recurrent layers"):
        LLM(tmp_path, drafts="ngram", device="cuda", **OPTIONS)
