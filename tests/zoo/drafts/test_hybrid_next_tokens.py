"""The layer of multi-token prediction of Qwen3-Next, Qwen3.5 and Qwen3.6, float32 on a CPU.

The model's other layers are recurrent, so the layer's KV is in one of several cache groups.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from helpers.engine_runs import drive, greedy, make_engine
from helpers.guessing import (
    OPTIONS,
    PROMPTS,
    SAMPLING,
    check_ranks,
    check_requests,
    engine_of,
    every_third_token,
    scheduler_of,
)
from helpers.predicting import HYBRIDS, Predicting, save_predicting
from minisgl.engine import Engine
from minisgl.errors import ConfigError
from minisgl_zoo.drafts import rule as rule_module

REQUESTS = [(prompt, replace(SAMPLING["hot"], seed=i)) for i, prompt in enumerate(PROMPTS)]


@pytest.fixture(autouse=True)
def drafts_whatever_is_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule_module, "LEAST_GAIN", 0.0)


@pytest.fixture(scope="module")
def certain(tmp_path_factory: pytest.TempPathFactory) -> Predicting:
    return save_predicting(tmp_path_factory.mktemp("certain"), "qwen3.5", is_certain=True)


@pytest.fixture(scope="module")
def pair(certain: Predicting) -> Iterator[tuple[Engine, Engine]]:
    """Engines without and with the layer."""
    off, on = engine_of(certain, drafts="off"), engine_of(certain)
    yield off, on
    off.close()
    on.close()


@pytest.mark.parametrize("case", HYBRIDS)
def test_guesses_are_the_references(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINISGL_CHECK_PAGES", "1")
    check_requests(save_predicting(tmp_path, case), overlap=case != "qwen3-next")


@pytest.mark.parametrize("name", SAMPLING)
def test_answers_are_the_same_and_certain_guesses_are_accepted(
    pair: tuple[Engine, Engine], name: str
) -> None:
    off, on = pair
    requests = [(prompt, SAMPLING[name]) for prompt in PROMPTS]
    expected = drive(off, requests, turns=[0, 1, 2, 6], scheduler=scheduler_of(off))
    scheduler = scheduler_of(on)
    assert drive(on, requests, turns=[0, 1, 2, 6], scheduler=scheduler) == expected
    stats = scheduler.stats
    assert stats.num_drafted > 30
    assert stats.num_accepted >= (0.4 if name == "penalties" else 0.9) * stats.num_drafted


def test_masked_rows_have_guesses_too(pair: tuple[Engine, Engine]) -> None:
    requests = [(prompt, greedy(24)) for prompt in PROMPTS]
    outputs = []
    for engine in pair:
        scheduler = scheduler_of(engine)
        scheduler._create_masker = every_third_token
        outputs.append(drive(engine, requests, turns=[0, 1, 2, 6], scheduler=scheduler))
    assert outputs[0] == outputs[1]
    assert scheduler.stats.num_accepted > 10, "of the requests without a mask"


def test_its_memory_is_one_more_layer_of_the_full_group(pair: tuple[Engine, Engine]) -> None:
    before, after = (each.memory.group_page_bytes for each in pair)
    assert after[0] == 2 * before[0], "the model has one layer of attention"
    assert after[2:] == before[2:], "states"


def test_rounded_weights_and_caches_have_the_same_answers(certain: Predicting) -> None:
    outputs = []
    for drafts in ("off", "mtp"):
        engine = engine_of(certain, drafts=drafts, quantization="int8", kv_cache_dtype="int8")
        scheduler = scheduler_of(engine)
        outputs.append(drive(engine, REQUESTS, scheduler=scheduler))
        engine.close()
    assert outputs[0] == outputs[1]
    assert scheduler.stats.num_accepted > 10


def test_ranks_have_the_same_guesses(tmp_path: Path) -> None:
    model = save_predicting(tmp_path / "model", "qwen3.5-moe", is_certain=True)
    requests = [*REQUESTS[:2], *((prompt, greedy(16)) for prompt in PROMPTS[2:])]
    check_ranks(model, requests, tmp_path / "store")


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "none in the files": ({}, r"--drafts mtp needs the tensors mtp\.\*, and the files have none"),
    "none in the config": ({"mtp_num_hidden_layers": 0}, "--drafts mtp needs a layer"),
    "a chain": ({"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers must be 1"),
    "an embedding of its own": (
        {"mtp_use_dedicated_embeddings": True},
        "mtp_use_dedicated_embeddings must be false",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_another_form_is_refused(certain: Predicting, tmp_path: Path, name: str) -> None:
    changes, says = REFUSALS[name]
    values = json.loads((certain.folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | changes))
    tensors = load_file(certain.folder / "model.safetensors")
    kept = {each: tensors[each] for each in tensors if changes or not each.startswith("mtp.")}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=says):
        make_engine((tmp_path, certain.layers), **OPTIONS | {"drafts": "mtp"})
