"""config.json: what is read, and what is said about what is wrong."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    LlamaConfig,
    PreTrainedConfig,
    Qwen3Config,
)

from helpers.model_harness import to_old_spelling
from minisgl.errors import CheckpointError, ConfigError, UnsupportedModel
from minisgl.models import ModelConfig, supported_architectures
from minisgl.models.loading.reading import read_config
from minisgl.models.registry import get_model_class, spec_of
from minisgl.models.spec import Family

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "max_position_embeddings": 256,
    "torch_dtype": "bfloat16",
}
LLAMA3 = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
QWEN3 = {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 2}
QWEN2 = {**QWEN3, "architectures": ["Qwen2ForCausalLM"]}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"]}


def read(folder: Path, values: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(values))
    return read_config(folder)


def windows(folder: Path, values: dict[str, Any]) -> tuple[int | None, ...]:
    config = read(folder, values)
    return tuple(layer.window for layer in spec_of(config).layers)


def test_both_spellings_are_one_config(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e6, "beta_fast": 16.0}
    Qwen3Config(
        architectures=["Qwen3ForCausalLM"], dtype="bfloat16", rope_parameters=rope
    ).save_pretrained(tmp_path)
    new = read_config(tmp_path)
    to_old_spelling(tmp_path)
    assert "rope_parameters" not in (tmp_path / "config.json").read_text()
    old = read_config(tmp_path)
    assert (new.rope.theta, new.rope.rope_type, new.dtype) == (1e6, "yarn", torch.bfloat16)
    assert dataclasses.replace(old, fields=new.fields) == new


def test_absent_fields_mean_what_they_mean_in_transformers(tmp_path: Path) -> None:
    llama = read(tmp_path, LLAMA)
    assert (llama.num_kv_heads, llama.head_dim, llama.norm_eps) == (8, 8, 1e-6)
    assert (llama.rope.theta, llama.max_context) == (10_000.0, 256)
    assert not llama.tie_word_embeddings
    assert read(tmp_path, QWEN3).head_dim == Qwen3Config().head_dim
    assert LlamaConfig().rms_norm_eps == llama.norm_eps


@pytest.mark.parametrize("field", ["hidden_act", "hidden_activation"])
@pytest.mark.parametrize("name", ["Gemma", "Gemma2", "Gemma3", "Gemma4", "Llama"])
def test_an_activation_of_null_is_the_families_own(name: str, field: str, tmp_path: Path) -> None:
    """It was SiLU for all of them."""
    config_class: type[PreTrainedConfig] = getattr(
        transformers, f"{name}TextConfig" if name in ("Gemma3", "Gemma4") else f"{name}Config"
    )
    config_class(architectures=[f"{name}ForCausalLM"], dtype="float32").save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    for other in ("hidden_act", "hidden_activation"):
        values.pop(other, None)
    expected = "silu" if name == "Llama" else "gelu_tanh"
    assert read(tmp_path, {**values, field: None}).activation == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (MISTRAL, (4096,) * 3),
        ({**MISTRAL, "sliding_window": None}, (None,) * 3),
        (QWEN2, (None,) * 3),
        ({**QWEN2, "sliding_window": 8, "max_window_layers": 0}, (None,) * 3),
        (
            {**QWEN3, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
            (None, None, 8),
        ),
    ],
)
def test_windows(values: dict[str, Any], expected: tuple[int | None, ...], tmp_path: Path) -> None:
    assert windows(tmp_path, values) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "hidden_size is missing; expected an integer of at least 1"),
        ({"hidden_size": "64"}, "hidden_size must be an integer of at least 1, got '64'"),
        ({"vocab_size": 2**70}, r"vocab_size must be an integer below 2 \*\* 31, got 11805916207"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be an integer of at least 1, got 0"),
        ({"vocab_size": True}, "vocab_size must be an integer of at least 1, got True"),
        ({"rms_norm_eps": -1}, "rms_norm_eps must be a positive number, got -1"),
        ({"num_key_value_heads": 3}, "num_key_value_heads must be a divisor of 8 query heads"),
        ({"num_attention_heads": 1, "num_key_value_heads": 2}, "a divisor of 1 query head, got 2"),
        ({"hidden_size": 65}, "head_dim is missing; expected an integer, since 8 heads do"),
        ({"head_dim": 7}, "7 of a head's 7 dims would be rotated"),
        ({"head_dim": 1026}, "a head would have 1026 dims; expected at most 1024"),
        ({"hidden_size": 16384}, "a head would have 2048 dims; expected at most 1024"),
        ({"partial_rotary_factor": 2.0}, "16 of a head's 8 dims would be rotated"),
        ({"hidden_act": "relu"}, "hidden_act must be one of silu"),
        ({"hidden_act": ""}, "hidden_act must be one of silu.*, got ''"),
        ({"hidden_act": False}, "hidden_act must be one of silu.*, got False"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers must be at most 1024, got 1000000"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false, got 1"),
        ({"torch_dtype": "int8"}, "torch_dtype must be one of float32"),
        ({"attention_bias": "no"}, "attention_bias must be true or false"),
        ({"rope_theta": "big"}, "rope_theta must be a positive number, got 'big'"),
        ({"rope_scaling": [1]}, r"rope_scaling must be one object for all layers, got \[1\]"),
        ({"rope_scaling": ""}, "rope_scaling must be one object for all layers, got ''"),
        ({"rope_parameters": 0}, "rope_parameters must be one object for all layers, got 0"),
        ({"rope_theta": 10**400}, "rope_theta must be a positive number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive number"),
        ({"torch_dtype": []}, "torch_dtype must be one of"),
        ({"rope_scaling": {"type": []}}, r"rope type '\[\]' is not supported"),
        ({"rope_scaling": {"type": "ntk"}}, "rope type 'ntk' is not supported; expected one of"),
        ({"rope_scaling": {"type": "su"}}, "short_factor is missing; expected a list of"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1, 2], "long_factor": []}},
            "short_factor must be a list of .* positive numbers",
        ),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 1e300}}, "context is below .*, got 1e"),
        ({"rope_scaling": {"type": "linear", "factor": 1e-3}}, "at least a token, got 0.001"),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 8}},
            "rope_parameters: low_freq_factor is missing",
        ),
        ({"rope_theta": 0.5}, "rope_theta must be above 1, got 0.5"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1}}, "must be above low_freq_factor 1.0"),
        ({"head_dim": 2, "rope_scaling": {"type": "dynamic", "factor": 2}}, "number from 4 to 2"),
        ({"architectures": []}, r"architectures must be a list with one name"),
        ({"quantization_config": {"bits": 4}}, "quantization_config.quant_method is None, exp"),
    ],
)
def test_what_is_wrong_is_named_with_its_file(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    pattern = f"{re.escape(str(tmp_path / 'config.json'))}: .*{message}"
    with pytest.raises(ConfigError, match=pattern):
        windows(tmp_path, {**LLAMA, **changes})


@pytest.mark.parametrize(
    "types",
    [
        ["full_attention"],
        ["full_attention", "sliding_attention", "full_attention"],
        [[]] * 3,
        "all",
    ],
)
def test_layer_types_that_cannot_be(types: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="layer_types must be"):
        windows(tmp_path, {**QWEN3, "layer_types": types})


@pytest.mark.parametrize("layers", [{}, "", 0, False, [True], ["0"], {"0": 1}])
@pytest.mark.parametrize("family", ["Qwen2Moe", "Qwen3Moe"])
def test_dense_layers_that_cannot_be(layers: Any, family: str, tmp_path: Path) -> None:
    values = {**QWEN3, "architectures": [f"{family}ForCausalLM"]}
    assert windows(tmp_path, {**values, "mlp_only_layers": None}) == (None,) * 3
    with pytest.raises(ConfigError, match="mlp_only_layers must be a list of layers' numbers, got"):
        windows(tmp_path, {**values, "mlp_only_layers": layers})


@pytest.mark.parametrize("family", ["Qwen3Moe", "Mixtral"])
def test_absurdly_many_experts_are_refused_at_once(family: str, tmp_path: Path) -> None:
    values = {**QWEN3, "architectures": [f"{family}ForCausalLM"], "num_local_experts": 2 * 10**9}
    with pytest.raises(ConfigError, match="num_local_experts must be at most 8192, got 2000000000"):
        windows(tmp_path, {**values, "num_experts_per_tok": 2})


def test_unknown_architecture_lists_the_known(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"'GPT2LMHeadModel'; supported are Afmoe.*Qwen3"):
        read(tmp_path, {"architectures": ["GPT2LMHeadModel"], "n_embd": 8})
    with pytest.raises(UnsupportedModel, match="'NewModel'; encoders here are BertModel"):
        read(tmp_path, {"architectures": ["NewModel"]})
    with pytest.raises(UnsupportedModel, match="did you mean Qwen3ForCausalLM"):
        read(tmp_path, {"architectures": ["Qwen33ForCausalLM"]})
    for architecture in supported_architectures():
        assert isinstance(get_model_class(architecture), Family)


@pytest.mark.parametrize("text", ["", "{", "[]", "\x80", "[" * 100_000])
def test_malformed_json_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_config(tmp_path)


def test_a_family_with_an_mlp_of_its_own_names_its_activation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = dataclasses.replace(get_model_class("LlamaForCausalLM"), activation="relu2")
    monkeypatch.setattr("minisgl.models.loading.reading.get_model_class", lambda _: family)
    assert read(tmp_path, {**LLAMA, "hidden_act": "relu2"}).num_layers == 3
    with pytest.raises(ConfigError, match="hidden_act must be one of relu2, got 'silu'"):
        read(tmp_path, {**LLAMA, "hidden_act": "silu"})
