"""Models with recurrent layers: the same tokens however they are scheduled, and what is cached.

The page guard is on: a state or a row of another request, or one that no step wrote, fails a step.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.engine_runs import drive, greedy, make_scheduler
from helpers.family_cases import SIZES
from helpers.hybrid_cases import HYBRID_CASES
from helpers.model_harness import VOCAB, make_reference, random_ids
from minisgl.core import SamplingParams
from minisgl.engine import Engine, EngineConfig
from minisgl.errors import ConfigError
from minisgl.scheduler import Scheduler
from minisgl_zoo.recurrent.pool import RecurrentPool

PAGE_SIZE = 16
NUM_TOKENS = 40
FEW = {"full": 22, "rows": 12, "state": 5}
"""Pages of a group that retract and evict."""


def make_engine(folder: Path, **options: Any) -> Engine:
    settings: dict[str, Any] = {
        "page_size": PAGE_SIZE,
        "max_running_requests": 6,
        "max_prefill_length": 100,
        "num_pages": 128,
        "drafts": "off",
    }
    return Engine(EngineConfig(model=str(folder), device="cpu", **(settings | options)))


@pytest.fixture(scope="module", params=["qwen3.5", "nemotron-h", "falcon-h1"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    config_class, changes, _, _ = HYBRID_CASES[request.param]
    sizes = {**SIZES, "max_position_embeddings": 1024, **changes}
    make_reference(config_class(**sizes)).save_pretrained(folder)
    return folder


@pytest.fixture
def engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setenv("MINISGL_CHECK_PAGES", "1")
    engine = make_engine(folder)
    yield engine
    engine.close()


def scheduler_of(engine: Engine, **options: Any) -> Scheduler:
    return make_scheduler(engine, vocab_size=VOCAB, **options)


def test_tokens_do_not_depend_on_scheduling(engine: Engine) -> None:
    """Prompts that part between two states, at one, and inside the first interval; greedy and
    seeded."""
    stem = random_ids(150)
    prompts = [stem[:n] + random_ids(m, n) for n, m in ((150, 3), (128, 9), (100, 70), (30, 1))]
    requests = [(prompt, greedy(NUM_TOKENS)) for prompt in prompts]
    requests += [
        (prompt, SamplingParams(temperature=1.0, seed=7, max_tokens=NUM_TOKENS))
        for prompt in prompts[:2]
    ]
    expected = [drive(engine, [r], scheduler=scheduler_of(engine))[0] for r in requests]
    assert len({tuple(ids) for ids in expected}) == len(requests)

    scheduler = scheduler_of(engine)
    assert drive(engine, requests, scheduler=scheduler) == expected
    assert drive(engine, requests, scheduler=scheduler, first_uid=10) == expected
    assert scheduler.stats.num_cached_tokens >= 3 * 64
    for chunk in (7, 65):
        scheduler = scheduler_of(engine, max_prefill_tokens=chunk)
        assert drive(engine, requests, scheduler=scheduler) == expected
    for options in ({"overlap": False}, {"turns": [0, 1, 2, 9, 30, 31]}):
        assert drive(engine, requests, scheduler=scheduler_of(engine), **options) == expected


def test_few_pages_retract_and_evict(engine: Engine) -> None:
    """Of each group in turn so few that requests are retracted and saved states are evicted."""
    prompts = [random_ids(n, n) for n in (100, 140, 60, 90)]
    requests = [(prompt, greedy(NUM_TOKENS)) for prompt in prompts]
    expected = [drive(engine, [r], scheduler=scheduler_of(engine))[0] for r in requests]
    for scarce, count in FEW.items():
        groups = tuple(
            replace(group, num_pages=count) if group.kind == scarce else group
            for group in engine.memory.groups
        )
        scheduler = scheduler_of(engine, groups=groups, watermark_tokens=1)
        assert drive(engine, requests, scheduler=scheduler) == expected, scarce
        assert drive(engine, requests[::-1], scheduler=scheduler, first_uid=10) == expected[::-1]


def test_a_pool_of_less_than_an_interval_serves(engine: Engine, folder: Path) -> None:
    requests = [(random_ids(n, n), greedy(9)) for n in (30, 39, 5)]
    expected = [drive(engine, [r], scheduler=scheduler_of(engine))[0] for r in requests]
    small = make_engine(folder, num_pages=3)
    scheduler = scheduler_of(small, groups=small.memory.groups)
    assert scheduler.config.num_pool_tokens == 48
    assert drive(small, requests, scheduler=scheduler) == expected
    small.close()


@pytest.mark.parametrize("seed", range(2))
def test_random_runs_give_the_tokens_of_each_alone(engine: Engine, seed: int) -> None:
    """Prompts with common prefixes come at random times, to random chunks and scarce pages."""
    rng = random.Random(seed)
    stems = [random_ids(rng.randrange(40, 200), 90 + stem) for stem in range(2)]
    requests = []
    for index in range(7):
        stem = rng.choice(stems)
        own = random_ids(rng.randrange(1, 90), 100 * seed + index)
        prompt = stem[: rng.randrange(1, len(stem) + 1)] + own
        requests.append((prompt, greedy(rng.randrange(1, 50))))
    expected = [drive(engine, [r], scheduler=scheduler_of(engine))[0] for r in requests]
    groups = tuple(
        replace(group, num_pages=rng.randint(FEW[group.kind], min(group.num_pages, 60)))
        for group in engine.memory.groups
    )
    scheduler = scheduler_of(
        engine, groups=groups, watermark_tokens=1, max_prefill_tokens=rng.choice((7, 33, 100))
    )
    for uid in (0, 20):
        turns = [rng.randrange(60) for _ in requests]
        overlap = rng.random() < 0.7
        options = {"turns": turns, "first_uid": uid, "overlap": overlap}
        assert drive(engine, requests, scheduler=scheduler, **options) == expected


def cached_tokens(engine: Engine, scheduler: Scheduler, prompt: list[int], uid: int) -> int:
    before = scheduler.stats.num_cached_tokens
    drive(engine, [(prompt, greedy(2))], scheduler=scheduler, first_uid=uid)
    return scheduler.stats.num_cached_tokens - before


def test_the_second_prompt_of_a_branch_pays_and_the_third_does_not(engine: Engine) -> None:
    scheduler = scheduler_of(engine, max_prefill_tokens=512)
    stem = random_ids(170)
    prompts = [stem + random_ids(60, seed) for seed in (1, 2, 3)]
    # The first saves the state at 192, its last multiple. The second finds no state, since they
    # part at 170, and saves one at 128, the last multiple that they share.
    found = [cached_tokens(engine, scheduler, prompt, uid) for uid, prompt in enumerate(prompts)]
    assert found == [0, 0, 128]
    # A continuation of the first finds its last state.
    assert cached_tokens(engine, scheduler, prompts[0] + random_ids(9), 9) == 192


def test_choices_of_one_prompt_share_its_state(engine: Engine) -> None:
    scheduler = scheduler_of(engine)
    prompt = random_ids(200)
    seeds = range(4)
    requests = [
        (prompt, SamplingParams(temperature=1.0, seed=seed, max_tokens=9)) for seed in seeds
    ]
    outputs = drive(engine, requests, scheduler=scheduler)
    assert scheduler.stats.num_cached_tokens == 3 * 192
    assert outputs == [drive(engine, [r], scheduler=scheduler_of(engine))[0] for r in requests]


def test_memory_is_what_the_plan_says(engine: Engine, folder: Path) -> None:
    planned = dict(zip((g.kind for g in engine.memory.groups), engine.memory.groups, strict=True))
    sizes = dict(zip(planned, engine.memory.group_page_bytes, strict=True))
    pool = next(c.kv_pool for c in engine._contexts if isinstance(c.kv_pool, RecurrentPool))
    layers = pool._layers
    states = sum(x.nbytes for layer in layers for x in (layer.states, layer.tails))
    rows = sum(
        x.nbytes
        for layer in layers
        for x in (layer.inputs, layer.keys, layer.updates, layer.decays)
    )
    assert states == sizes["state"] * planned["state"].num_pages
    assert rows == sizes["rows"] * planned["rows"].num_pages
    # Of the convolution's inputs a page keeps one for each of its 4 taps.
    assert len(layers[0].inputs) == 4 * planned["rows"].num_pages
    assert "a state every 64 tokens" in str(engine.memory)
    with_drafts = make_engine(folder, drafts="ngram", num_pages=8)  # all inputs, so that all may go
    pools = (context.kv_pool for context in with_drafts._contexts)
    pool = next(pool for pool in pools if isinstance(pool, RecurrentPool))
    num_pages = next(g.num_pages for g in with_drafts.memory.groups if g.kind == "rows")
    assert len(pool.layer(0).inputs) == PAGE_SIZE * num_pages
    with_drafts.close()
    # Saved states take half as many bytes as the KV, and 512 tokens run with a state.
    saved = planned["state"].num_pages - 3 - 128 * PAGE_SIZE // 512
    assert 0.35 < saved * sizes["state"] / (sizes["full"] * planned["full"].num_pages) <= 0.5


@pytest.mark.parametrize("folder", ["qwen3.5"], indirect=True)
def test_a_page_size_that_does_not_divide_the_interval_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="--page-size 48: this model has recurrent states"):
        make_engine(folder, page_size=48)


@pytest.mark.parametrize("folder", ["qwen3.5"], indirect=True)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_num_key_heads": 3}, "linear_num_key_heads must be a divisor of 4"),
        ({"layer_types": ["full_attention"] * 3 + ["mamba"]}, "layer_types must be a list of full"),
    ],
)
def test_a_config_that_cannot_be_is_refused(
    folder: Path, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    values = json.loads((folder / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=message):
        make_engine(tmp_path, dummy_weight=True)


@torch.inference_mode()
def test_bfloat16_is_the_same_cold_and_cached(folder: Path) -> None:
    engine = make_engine(folder, dtype="bfloat16")
    try:
        requests = [(random_ids(n, n), greedy(12)) for n in (70, 200)]
        scheduler = scheduler_of(engine)
        first = drive(engine, requests, scheduler=scheduler)
        assert drive(engine, requests, scheduler=scheduler, first_uid=10) == first
        assert scheduler.stats.num_cached_tokens == 64 + 192
    finally:
        engine.close()


@pytest.mark.parametrize("folder", ["qwen3.5"], indirect=True)
def test_quantization_leaves_the_gates_plain(folder: Path) -> None:
    engine = make_engine(folder, quantization="int8")
    try:
        quantised = {
            part.name.rpartition("linear_attn.")[2]
            for parameter in engine.model.parameters()
            for part in parameter.parts
            if parameter.dtype == torch.int8 and "linear_attn." in part.name
        }
        assert quantised == {"in_proj_qkv.weight", "in_proj_z.weight", "out_proj.weight"}
        assert len(drive(engine, [(random_ids(70), greedy(4))], vocab_size=VOCAB)[0]) == 4
    finally:
        engine.close()
