"""The sampling parameters that a checkpoint recommends, and a warning about other fields."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from minisgl.core import SamplingParams
from minisgl.errors import CheckpointError
from minisgl.tokenizer.defaults import (
    GenerationDefaults,
    read_generation_defaults,
    sampling_defaults,
)


def test_fields_without_an_effect_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"top_k": 20, "repetition_penalty": 1.05, "num_beams": 4}))
    (tmp_path / "config.json").write_text("{}")
    assert sampling_defaults(tmp_path) == SamplingParams(top_k=20, repetition_penalty=1.05)
    [told] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "asks for num_beams 4, which is not done here" in told


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (None, {}, GenerationDefaults()),
        (None, {"eos_token_id": 7}, GenerationDefaults(eos_token_ids=(7,))),
        (
            {"top_k": 5},
            {"eos_token_id": [7]},
            GenerationDefaults(eos_token_ids=(7,), sampling={"top_k": 5}),
        ),
        (
            {"eos_token_id": [3, 4, 3], "do_sample": True, "temperature": 0.6, "top_p": 1},
            {"eos_token_id": 7},
            GenerationDefaults(eos_token_ids=(3, 4), sampling={"temperature": 0.6, "top_p": 1.0}),
        ),
        (
            {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1},
            {"eos_token_id": 0},
            GenerationDefaults(
                eos_token_ids=(0,), sampling={"temperature": 0.0, "repetition_penalty": 1.1}
            ),
        ),
        (
            {"guidance_scale": 1.05, "num_beams": 1, "suppress_tokens": [], "min_length": None},
            {},
            GenerationDefaults(unsupported={"guidance_scale": 1.05}),
        ),
    ],
)
def test_generation_defaults(
    generation: dict[str, Any] | None,
    config: dict[str, Any],
    expected: GenerationDefaults,
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert read_generation_defaults(tmp_path) == expected


@pytest.mark.parametrize(
    "values",
    [
        {"eos_token_id": "x"},
        {"eos_token_id": -1},
        {"top_k": 1.5},
        {"min_p": "0"},
        {"top_p": True},
        {"top_k": float("inf")},
        {"min_p": float("nan")},
        {"temperature": 10**400},
    ],
)
def test_generation_defaults_of_a_wrong_type(values: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: {next(iter(values))}"):
        read_generation_defaults(tmp_path)


def test_a_generation_config_without_recommendations_is_neutral(tmp_path: Path) -> None:
    config = {"_name_or_path": "smollm2", "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 2}')
    assert sampling_defaults(tmp_path) == SamplingParams()
