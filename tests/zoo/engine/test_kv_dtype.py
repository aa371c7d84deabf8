"""`--kv-cache-dtype`: a model whose keys and values are rounded to 8 bits when they are stored.

Planted once, and noticed: int8 scales of the neighbouring head.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.engine_runs import Reference, drive, greedy, make_engine, make_scheduler, prompts
from helpers.family_cases import CASES, SIZES
from helpers.model_harness import (
    Runner,
    Sequence,
    load,
    make_reference,
    random_ids,
    relative_error,
)
from helpers.quantised_kv import KV_DTYPES, RoundedCache, RoundedLatents
from minisgl.attention import create_attention_backend
from minisgl.core import SamplingParams
from minisgl.engine import Engine, EngineConfig
from minisgl.errors import ConfigError
from minisgl.kernel.ops import Ops
from minisgl.llm import LLM

NAMES = ("fp8", "int8")
BY_NAME = dict(zip(NAMES, KV_DTYPES, strict=True))
TOLERANCE = {"fp8": 1e-3, "int8": 2e-4}
"""Of the largest logit. It is 1e-6, unless sums in another order move a key over the boundary
between two numbers: then it was up to 3e-5."""
ROUNDING = {"fp8": 5e-2, "int8": 1e-2}
"""What 8 bits change in these models' logits, at least."""
NUM_OUTPUTS = 24


@pytest.mark.parametrize("chunk", [7, 1000])
@pytest.mark.parametrize("attn", ["torch", "cpu"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_rounded_keys_and_values(
    reference: Reference, name: str, attn: str, chunk: int
) -> None:
    folder, theirs = reference
    runner = Runner(
        load(folder), page_size=8, rows=1, attn=create_attention_backend(attn, Ops()),
        kv_dtype=BY_NAME[name],
    )  # fmt: skip
    sequence = Sequence(prompts(6)[2], NUM_OUTPUTS)
    runner.generate([sequence], chunk=chunk)
    ids = torch.tensor([sequence.ids[:-1]])
    with torch.inference_mode():
        want = theirs(ids, cache=RoundedCache(BY_NAME[name])).logits[0]
        plain = theirs(ids).logits[0]
    got = torch.cat(sequence.logits)
    assert relative_error(got, want) <= TOLERANCE[name]
    assert relative_error(plain, want) >= ROUNDING[name]


@pytest.mark.parametrize("attn", ["torch", "cpu"])
@pytest.mark.parametrize("case", ["gemma4", "gemma4-shared", "glm4-lite-moe"])
def test_keys_that_are_values_or_another_layer_s(case: str, attn: str, tmp_path: Path) -> None:
    make, fields, _, _ = CASES[case]
    cache = RoundedLatents if case == "glm4-lite-moe" else RoundedCache
    theirs = make_reference(make(**{**SIZES, **fields}))
    theirs.save_pretrained(tmp_path)
    model = load(tmp_path)
    for name in NAMES:
        backend, sequence = create_attention_backend(attn, Ops()), Sequence(random_ids(40, 3), 4)
        runner = Runner(model, page_size=8, rows=1, attn=backend, kv_dtype=BY_NAME[name])
        runner.generate([sequence], chunk=17)  # a window has 9 tokens
        ids = torch.tensor([sequence.ids[:-1]])
        with torch.inference_mode():
            want = theirs(ids, cache=cache(BY_NAME[name])).logits[0]
        assert relative_error(torch.cat(sequence.logits), want) <= TOLERANCE[name]


@pytest.fixture(
    scope="module", params=[("torch", "int8"), ("cpu", "int8"), ("cpu", "fp8")], ids=str
)
def engine(reference: Reference, request: pytest.FixtureRequest) -> Iterator[Engine]:
    attn, name = request.param
    engine = make_engine(reference, attn=attn, kv_cache_dtype=name)
    yield engine
    engine.close()


def test_the_same_tokens_however_they_are_scheduled(engine: Engine) -> None:
    """Batch = single = chunked = cached = retracted."""
    texts = prompts(6)
    texts += [[*texts[1][:50], 1, 2, 3]]
    requests = [(prompt, greedy(NUM_OUTPUTS)) for prompt in texts]
    scheduler = make_scheduler(engine)
    expected = drive(engine, requests, scheduler=scheduler)
    assert len({tuple(ids) for ids in expected}) == len(texts)
    assert drive(engine, requests, scheduler=scheduler, first_uid=10) == expected
    assert scheduler.stats.num_cached_tokens > 0
    for request, ids in zip(requests, expected, strict=True):
        assert drive(engine, [request]) == [ids]
    assert drive(engine, requests, max_prefill_tokens=5) == expected
    assert drive(engine, requests, overlap=False) == expected
    scheduler = make_scheduler(engine, num_pages=18, watermark_tokens=1)
    assert drive(engine, requests, scheduler=scheduler) == expected
    assert scheduler.stats.num_retractions > 0


def config(folder: Path, **options: Any) -> EngineConfig:
    return EngineConfig(model=str(folder), max_prefill_length=64, max_running_requests=4, **options)


def test_the_plan_counts_what_is_allocated(folder: Path) -> None:
    sizes = {}
    for name in ("auto", *NAMES):
        engine = Engine(config(folder, num_pages=50, kv_cache_dtype=name))
        layers = [engine._contexts[0].kv_pool.layer(index) for index in range(3)]
        held = sum(
            x.nbytes
            for layer in layers
            for x in (layer.k, layer.v, *((layer.k_scale, layer.v_scale) if name == "int8" else ()))
        )
        assert engine.memory.kv_bytes == held
        sizes[name] = engine.memory.group_page_bytes[0]
        engine.close()
    heads = 3 * 2 * 2 * 16  # layers, keys and values, heads, tokens of a page
    assert sizes == {"auto": heads * 80, "fp8": heads * 20, "int8": heads * 24}


@pytest.mark.parametrize("name", NAMES)
def test_the_guard_finds_unwritten_pages(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINISGL_CHECK_PAGES", "1")
    engine = Engine(config(folder, num_pages=50, kv_cache_dtype=name))
    assert engine._guard is not None
    layer = engine._contexts[0].kv_pool.layer(0)
    for pages in engine._guard._filled[0]:
        pages[torch.tensor([3])] = torch.nan
    k, v = layer.read(torch.tensor([3]))
    assert k.isnan().all()
    assert v.isnan().all()
    engine.close()


def test_llm_and_a_name_that_does_not_exist() -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=12)
    texts = []
    for name in ("auto", *NAMES):
        with LLM(kv_cache_dtype=name, device="cpu", num_pages=64, progress=False) as llm:
            texts.append(llm.generate("What is 12 plus 30?", sampling)[0].text)
    assert texts[0] == texts[1] == texts[2]
    assert "42" in texts[0]
    with pytest.raises(ConfigError, match="kv_cache_dtype must be one of auto, fp8, int8"):
        LLM(kv_cache_dtype="fp4")
