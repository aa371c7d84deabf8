"""Short convolutions: the same tokens however they are scheduled, and the memory that is planned.

The page guard is on: an input of another request, or one that no step wrote, fails a step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.engine_runs import drive, greedy, make_engine, make_scheduler
from helpers.family_cases import SIZES
from helpers.hybrid_cases import HYBRID_CASES
from helpers.model_harness import VOCAB, make_reference, random_ids
from minisgl.core import SamplingParams
from minisgl.engine import Engine
from minisgl.errors import ConfigError
from minisgl.models.loading.reading import read_config
from minisgl.models.registry import spec_of
from minisgl.scheduler import Scheduler
from minisgl_zoo.recurrent.short_conv import ConvPool

PAGE_SIZE, TAPS = 4, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lfm2")
    config_class, changes, _, _ = HYBRID_CASES["lfm2"]
    sizes = {**SIZES, "max_position_embeddings": 1024, **changes}
    make_reference(config_class(**sizes)).save_pretrained(folder)
    return folder


@pytest.fixture
def engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setenv("MINISGL_CHECK_PAGES", "1")
    reference = (folder, None)
    engine = make_engine(reference, device="cpu", page_size=PAGE_SIZE)  # type: ignore[arg-type] # only the folder is read
    yield engine
    engine.close()


def scheduler_of(engine: Engine, **options: Any) -> Scheduler:
    return make_scheduler(engine, vocab_size=VOCAB, **options)


def test_tokens_do_not_depend_on_scheduling(engine: Engine) -> None:
    stem = random_ids(150)
    prompts = [stem[:n] + random_ids(m, n) for n, m in ((150, 3), (128, 9), (100, 70), (1, 1))]
    requests = [(prompt, greedy(24)) for prompt in prompts]
    requests.append((prompts[0], SamplingParams(temperature=1.0, seed=7, max_tokens=24)))
    expected = [drive(engine, [r], scheduler=scheduler_of(engine))[0] for r in requests]
    assert len({tuple(ids) for ids in expected}) == len(requests)
    scheduler = scheduler_of(engine)
    assert drive(engine, requests, scheduler=scheduler) == expected
    assert drive(engine, requests, scheduler=scheduler, first_uid=10) == expected
    assert scheduler.stats.num_cached_tokens >= 3 * 100
    for chunk in (1, 2, 7):  # shorter than the convolution, as long as it reads, longer
        scheduler = scheduler_of(engine, max_prefill_tokens=chunk)
        assert drive(engine, requests, scheduler=scheduler) == expected
    for options in ({"overlap": False}, {"turns": [0, 1, 2, 9, 30]}):
        assert drive(engine, requests, scheduler=scheduler_of(engine), **options) == expected


def test_few_pages_retract_and_evict(engine: Engine) -> None:
    requests = [(random_ids(n, n), greedy(24)) for n in (100, 140, 60, 90)]
    expected = [drive(engine, [r], scheduler=scheduler_of(engine))[0] for r in requests]
    for scarce, count in (("full", 64), ("window", 20)):
        groups = tuple(
            replace(group, num_pages=count) if group.kind == scarce else group
            for group in engine.memory.groups
        )
        scheduler = scheduler_of(engine, groups=groups, watermark_tokens=1)
        assert drive(engine, requests, scheduler=scheduler) == expected, scarce
        assert drive(engine, requests[::-1], scheduler=scheduler, first_uid=10) == expected[::-1]


def test_memory_is_what_the_plan_says(engine: Engine) -> None:
    full, window = engine.memory.groups
    assert (full.kind, window.kind, window.window) == ("full", "window", TAPS)
    assert window.num_pages < full.num_pages
    pool = next(c.kv_pool for c in engine._contexts if isinstance(c.kv_pool, ConvPool))
    held = sum(pool.layer(index).pages.nbytes for index in range(3))
    assert held == engine.memory.group_page_bytes[1] * window.num_pages


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["conv"] * 4}, "a list with one or more full_attention"),
        ({"layer_types": ["conv"] * 3 + ["mamba"]}, "a list of full_attention and conv"),
        ({"conv_L_cache": 1}, "conv_L_cache must be an integer of at least 2"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 8}, "a divisor of 48"),
    ],
)
def test_a_config_that_cannot_be_is_refused(
    folder: Path, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    values = json.loads((folder / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = read_config(tmp_path)
    with pytest.raises(ConfigError, match=message):
        spec_of(config)
