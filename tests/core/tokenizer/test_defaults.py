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
from minisgl.tokenizer.recommended import FOR_OTHERS, RECOMMENDED


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


@pytest.mark.parametrize(
    ("config", "expected", "said"),
    [
        (
            {"_name_or_path": "smollm2 Smollm2 135M", "architectures": ["LlamaForCausalLM"]},
            {"temperature": 0.2, "top_p": 0.9},
            "the model card of HuggingFaceTB/SmolLM2-135M-Instruct, for SmolLM2: temperature 0.2",
        ),
        (
            {"architectures": ["Gemma3ForCausalLM"]},
            {"temperature": 1.0, "top_p": 0.95, "top_k": 64},
            "for Gemma: temperature 1, top_p 0.95, top_k 64",
        ),
        (
            {"_name_or_path": "Qwen3 4B Instruct 2507", "architectures": ["Qwen3ForCausalLM"]},
            {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
            "Qwen/Qwen3-4B-Instruct-2507",
        ),
        (
            {"_name_or_path": "DeepSeek R1 Distill Qwen", "architectures": ["Qwen2ForCausalLM"]},
            {"temperature": 0.6, "top_p": 0.95},
            "deepseek-ai/DeepSeek-R1",
        ),
        (
            {"_name_or_path": "Phi 4", "architectures": ["Phi3ForCausalLM"]},
            {"temperature": 0.7, "top_p": 0.95, "min_p": 0.05},
            "Mini-SGLang, for models that recommend none: temperature 0.7, top_p 0.95, min_p 0.05",
        ),
        ({}, {"temperature": 0.7, "top_p": 0.95, "min_p": 0.05}, "models that recommend none"),
    ],
)
def test_defaults_without_a_generation_config(
    config: dict[str, Any],
    expected: dict[str, float],
    said: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with caplog.at_level("INFO"):
        assert sampling_defaults(tmp_path) == SamplingParams(**expected)
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("sampling defaults from ")
    assert said in line


def test_a_generation_config_without_recommendations_is_neutral(tmp_path: Path) -> None:
    config = {"_name_or_path": "smollm2", "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 2}')
    assert sampling_defaults(tmp_path) == SamplingParams()


def test_each_recommendation_is_valid_and_has_a_source() -> None:
    for row in (*RECOMMENDED, FOR_OTHERS):
        assert SamplingParams(**row.sampling)
        assert row.source
