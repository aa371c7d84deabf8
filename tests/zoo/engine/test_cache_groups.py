"""Models with windows and with layers of several shapes, through the real engine and scheduler.

The page guard is on: a row that reads or writes a wrong page fails its step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MistralConfig

from helpers.engine_runs import VOCAB, drive, greedy, make_scheduler, prompts
from helpers.model_harness import Runner, Sequence, make_reference
from minisgl.engine import Engine, EngineConfig
from minisgl.message import UserMsg, ids_to_bytes
from minisgl.models import ModelConfig, ModelSpec
from minisgl.models.families.dense import QWEN3
from minisgl.runtime.args import RuntimeArgs
from minisgl.runtime.engine_worker import _info
from minisgl.runtime.scheduling import scheduler_config
from minisgl.utils.start import StartClock

WINDOW, CHUNK, PAGE_SIZE = 13, 16, 4
MOST_PAGES = 9  # (13 + 16) / 4, and a page that is begun at both ends


def make_engine(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Engine:
    monkeypatch.setenv("MINISGL_CHECK_PAGES", "1")
    settings = {"page_size": PAGE_SIZE, "max_running_requests": 8, "max_prefill_length": CHUNK}
    return Engine(EngineConfig(model=str(folder), device="cpu", **(settings | options)))


# --- one window group ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """A checkpoint, and transformers' tokens for the prompts."""
    config = MistralConfig(
        vocab_size=VOCAB, hidden_size=48, intermediate_size=80, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        sliding_window=WINDOW,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("mistral")
    model = make_reference(config)
    model.save_pretrained(folder)
    outputs = []
    for prompt in prompts(5):
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            for _ in range(48):
                logits = model(ids).logits[0, -1]
                top2 = logits.topk(2).values
                assert top2[0] - top2[1] > 1e-4, "choose another seed: near-tie"
                ids = torch.cat((ids, logits.argmax().view(1, 1)), dim=1)
        outputs.append(ids[0, len(prompt) :].tolist())
    return folder, outputs


@pytest.mark.parametrize(("attn", "num_pages"), [("torch", 20), ("cpu", 20), ("cpu", MOST_PAGES)])
def test_windows_give_the_same_tokens_from_few_pages(
    mistral: tuple[Path, list[list[int]]],
    attn: str,
    num_pages: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Contexts of up to 167 tokens, in a pool that holds 36 or 80: alone, together, and again with
    the rest of them in the prefix cache."""
    folder, expected = mistral
    requests = [(prompt, greedy(48)) for prompt in prompts(5)]
    engine = make_engine(folder, monkeypatch, attn=attn, num_pages=num_pages)
    try:
        scheduler = make_scheduler(engine, watermark_tokens=1)
        for index, request in enumerate(requests):
            alone = drive(engine, [request], scheduler=scheduler, first_uid=index)
            assert alone == [expected[index]]
        assert drive(engine, requests, scheduler=scheduler, first_uid=10) == expected
        assert drive(engine, requests, scheduler=scheduler, first_uid=20) == expected
        assert drive(engine, requests, overlap=False) == expected
    finally:
        engine.close()


def test_pages_are_bounded_by_the_window(
    mistral: tuple[Path, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = mistral
    prompt = max(prompts(5), key=len)
    engine = make_engine(folder, monkeypatch, num_pages=100)
    try:
        scheduler = make_scheduler(engine)
        scheduler.add(UserMsg(uid=0, ids=ids_to_bytes(prompt), sampling=greedy(48)))
        used = []
        while (plan := scheduler.plan()) is not None:
            used.append(scheduler.requests.cache.num_used_pages)
            scheduler.commit(plan, engine.launch(plan).wait())
        assert len(prompt) + 48 > 8 * WINDOW
        assert max(used) <= MOST_PAGES
        # While it decodes: the window, and a page that is begun at both ends.
        assert max(used[-40:]) <= WINDOW // PAGE_SIZE + 2
        assert scheduler.requests.cache.num_cached_pages > MOST_PAGES  # kept for others, evictable
    finally:
        engine.close()


def test_the_context_is_what_the_scheduler_admits(
    mistral: tuple[Path, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients see it, and `max_tokens` is lowered to it. The pages hold 80 tokens."""
    folder, _ = mistral
    engine = make_engine(folder, monkeypatch, num_pages=20)
    try:
        settings = scheduler_config(RuntimeArgs(offline=True), engine, frozenset())
        info = _info(engine, settings, StartClock())
        assert info["context_length"] == 512
    finally:
        engine.close()


# --- two head dims, a full and a window group ----------------------------------------------------


def toy_spec(config: ModelConfig) -> ModelSpec:
    """Layers of three kinds: full of two shapes, and a window."""
    spec = QWEN3.spec(config)
    narrow = {"head_dim": 12, "rope": replace(config.rope, rotary_dim=12)}
    first, second, third = spec.layers
    layers = (
        replace(first, window=WINDOW, num_kv_heads=1, **narrow),
        second,
        replace(third, **narrow),
    )
    return replace(spec, layers=layers)


@pytest.fixture(params=["torch", "cpu"])
def toy(
    folder: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Engine]:
    family = replace(QWEN3, spec=toy_spec)
    monkeypatch.setattr("minisgl.models.registry.get_model_class", lambda _: family)
    engine = make_engine(folder, monkeypatch, attn=request.param, num_pages=120, dummy_weight=True)
    yield engine
    engine.close()


def test_layers_of_one_kind_share_a_pool(toy: Engine) -> None:
    layout = toy.model.layout
    assert [(group.kind, group.window) for group in layout.groups] == [("full", 0), ("window", 13)]
    assert [(pool.group, pool.num_kv_heads, pool.head_dim) for pool in layout.pools] == [
        (0, 2, 20),
        (0, 2, 12),
        (1, 1, 12),
    ]
    assert layout.places == ((2, 0), (0, 0), (1, 0))
    full, window = toy.memory.groups
    assert (full.num_pages, window.num_pages) == (120, 8 * 6 + 4)
    assert toy.memory.group_page_bytes == (2 * 4 * 2 * (20 + 12) * 4, 2 * 4 * 12 * 4)
    assert "KV pool, window" in str(toy.memory)


def test_mixed_layers_equal_a_dense_oracle(toy: Engine) -> None:
    """Batch = single = chunked = cached = retracted, and all equal one sequence in one step, in
    pools where nothing is freed."""
    texts = [prompt[:70] for prompt in prompts(6)]
    texts += [[*texts[0][:50], 1, 2, 3], [*texts[0][:21], 5]]
    expected = []
    for prompt in texts:
        sequence = Sequence(prompt, 30)
        Runner(toy.model, page_size=PAGE_SIZE, rows=1).generate([sequence], chunk=1000)
        expected.append(sequence.outputs)
    assert len({tuple(ids) for ids in expected}) == len(texts)
    requests = [(prompt, greedy(30)) for prompt in texts]
    scheduler = make_scheduler(toy)
    assert drive(toy, requests, scheduler=scheduler) == expected
    assert drive(toy, requests, scheduler=scheduler, first_uid=10) == expected
    assert scheduler.stats.num_cached_tokens > 0
    for index, request in enumerate(requests):
        assert drive(toy, [request]) == [expected[index]]
    assert drive(toy, requests, max_prefill_tokens=5) == expected
    small = tuple(
        replace(group, num_pages=count)
        for group, count in zip(toy.memory.groups, (30, 60), strict=True)
    )
    scheduler = make_scheduler(toy, groups=small, watermark_tokens=1)
    assert drive(toy, requests, scheduler=scheduler) == expected
    assert scheduler.stats.num_retractions > 0
    assert drive(toy, requests[::-1], scheduler=scheduler, first_uid=10) == expected[::-1]
