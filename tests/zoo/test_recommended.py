"""The sampling parameters of publishers, for models that recommend none themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from minisgl.core import SamplingParams
from minisgl.tokenizer.defaults import sampling_defaults
from minisgl_zoo.recommended import RECOMMENDED


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


def test_each_recommendation_is_valid_and_has_a_source() -> None:
    for row in RECOMMENDED:
        assert SamplingParams(**row.sampling)
        assert row.source
