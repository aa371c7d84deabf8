"""Each config.json of `released` (README.md there names the sources), as it was released.

It builds a spec, and a small model of the same spelling computes what transformers computes after
reading the same file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)

from helpers.family_cases import check_case
from helpers.model_harness import Runner, load, randomised
from helpers.released import RELEASED, read, shrunk
from minisgl.models.loading.reading import read_config
from minisgl.models.registry import spec_of
from minisgl.quantization import PLAIN

HUB = {"kimi_k2": "deepseek_v3"}
"""A model type that transformers reads by the checkpoint's own code -> the same in transformers."""
VISION: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"depth": 1, "embed_dim": 16, "hidden_size": 64, "num_heads": 2},
    "qwen2_5_vl": {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2},
    "qwen3_vl": {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2},
}
VISION["qwen2_5_vl"]["out_hidden_size"] = 64
VISION["qwen3_vl"] |= {"out_hidden_size": 64, "num_position_embeddings": 16}
VISION["qwen3_vl"]["deepstack_visual_indexes"] = [0]
VISION["qwen3_vl_moe"] = VISION["qwen3_vl"]
"""Models whose text transformers has inside the whole model alone."""
WITHOUT_CLASS = {"XiaomiMiMo--MiMo-7B-Base"}
"""transformers has no class for it; test_aliases.py compares it with Qwen2's."""


def save(values: dict[str, Any], folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(values))


def reference_of(values: dict[str, Any], folder: Path) -> PreTrainedModel:
    """Return the random model that transformers makes of the same config."""
    torch.manual_seed(0)
    kind = values["model_type"]
    theirs = {name: value for name, value in values.items() if name != "auto_map"}
    theirs["model_type"] = HUB.get(kind, kind)
    if "attention_head_dim" in values:  # Nemotron-H's name, which transformers no longer reads
        theirs["head_dim"] = values["attention_head_dim"]
    if text := values.get("text_config"):
        theirs["text_config"] = text | {
            "model_type": HUB.get(text["model_type"], text["model_type"])
        }
    if "vision_config" in values:
        theirs["vision_config"] = VISION.get(kind, {})
    save(theirs, folder)
    config = AutoConfig.from_pretrained(folder)
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    if kind in VISION:
        return randomised(AutoModelForImageTextToText.from_config(config, **options))
    inner = config.get_text_config()
    inner.tie_word_embeddings = config.tie_word_embeddings
    return randomised(AutoModelForCausalLM.from_config(inner, **options))


@pytest.mark.parametrize("name", RELEASED)
def test_a_released_config_has_a_spec(name: str, tmp_path: Path) -> None:
    """With its sizes, and with the formats of its weights."""
    values = read(name)
    save(values, tmp_path)
    config = read_config(tmp_path)
    text = values.get("text_config", values)
    spec = spec_of(config)
    assert config.num_layers == text["num_hidden_layers"]
    assert config.max_context >= text["max_position_embeddings"]
    if spec.moe:
        index = spec.moe.is_sparse.index(True)
        router = spec.moe.names(index).router.removesuffix(".weight")
        assert config.formats.of([router], "Linear") is PLAIN
    is_quantised = "quantization_config" in values or "quantization_config" in text
    assert bool(config.formats.names) == is_quantised


@pytest.mark.parametrize("name", sorted({*RELEASED} - WITHOUT_CLASS))
@torch.inference_mode()
def test_a_small_model_computes_what_transformers_does(name: str, tmp_path: Path) -> None:
    values = shrunk(read(name))
    reference = reference_of(values, tmp_path)
    reference.save_pretrained(tmp_path, save_original_format=True)
    save(values, tmp_path)
    check_case(reference, Runner(load(tmp_path, max_context=128), page_size=4), num_outputs=9)
