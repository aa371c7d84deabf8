"""Quantised checkpoints of families whose files have other names than the layers declare: lists of
a quantization_config name modules as the files do.

fp8 in the spelling of ModelOpt (Nemotron's releases) and of compressed-tensors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from helpers.family_cases import CASES as FAMILIES
from helpers.family_cases import SIZES
from helpers.model_harness import relative_error
from helpers.quantised import TOLERANCE, is_linear, run, run_ranks, save_both
from minisgl.errors import ConfigError
from minisgl_zoo.weights.formats import names_in_files

FP8 = torch.float8_e4m3fn


def case(name: str) -> PreTrainedConfig:
    config_class, changes, *_ = FAMILIES[name]
    return config_class(**{**SIZES, **changes})


def modelopt(*plain: str) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head", *plain]}


def compressed(*plain: str) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": ["lm_head", *plain],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


# name -> (quantization_config, parts of the names of modules that stay plain)
# Routers do, listed or not.
CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "lfm2": (
        compressed("model.layers.0.feed_forward.w1", "model.layers.0.feed_forward.w3"),
        ("layers.0.feed_forward.w1", "layers.0.feed_forward.w3"),
    ),
    "lfm2-moe": (
        compressed(r"re:.*conv\.in_proj$"),
        ("feed_forward.gate.", "conv.in_proj"),
    ),
    "nemotron-h": (
        modelopt("backbone.layers.0.mixer.in_proj", "backbone.layers.3*"),
        ("layers.0.mixer.in_proj", "layers.3."),
    ),
    "nemotron-3": (modelopt(), ("mixer.gate.",)),
    "deepseek-v3-moe": (compressed(), ("mlp.gate.",)),
    "afmoe": (compressed(), ("mlp.router.gate.",)),
}


def fp8(module: str, tensor: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scale = tensor.abs().max() / 448
    numbers = (tensor / scale).to(FP8)
    tensors = {"weight": numbers, "weight_scale": scale.clone(), "input_scale": torch.ones(())}
    return tensors, numbers.float() * scale


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_dequantised_weights(name: str, tmp_path: Path) -> None:
    quantization, plain = CASES[name]

    def is_quantised(file_name: str, tensor: Tensor) -> bool:
        return is_linear(file_name, tensor) and not any(part in file_name for part in plain)

    tensors = save_both(case(name), quantization, fp8, tmp_path, is_quantised)
    assert sum(tensor.dtype == FP8 for tensor in tensors.values()) > 5
    expected, tokens = run(tmp_path / "float32")
    for logits, ours in (run(tmp_path / "quantised"), *run_ranks(tmp_path / "quantised")):
        assert relative_error(logits, expected) <= TOLERANCE
        assert ours == tokens


def fp8_rows(module: str, tensor: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scale = tensor.abs().amax(1, keepdim=True) / 448
    numbers = (tensor / scale).to(FP8)
    return {"weight": numbers, "weight_scale": scale}, numbers.float() * scale


@pytest.mark.parametrize("name", ["falcon-h1", "falcon-h1-norm-after"])
def test_constants_multiply_the_scales(name: str, tmp_path: Path) -> None:
    quantization = compressed()
    quantization["config_groups"]["group_0"]["weights"]["strategy"] = "channel"
    tensors = save_both(case(name), quantization, fp8_rows, tmp_path)
    assert any("in_proj.weight_scale" in each for each in tensors)
    expected, tokens = run(tmp_path / "float32")
    for logits, ours in (run(tmp_path / "quantised"), *run_ranks(tmp_path / "quantised")):
        assert relative_error(logits, expected) <= TOLERANCE
        assert ours == tokens


def test_a_scale_of_rows_with_several_constants_is_refused(tmp_path: Path) -> None:
    save_both(case("falcon-h1"), modelopt(), fp8, tmp_path)
    with pytest.raises(ConfigError, match=r"in_proj\.weight_scale \[1\] has one entry for 188"):
        run(tmp_path / "quantised")


def test_a_scale_of_the_matrix(tmp_path: Path) -> None:
    """Of all but the projection whose rows have several constants."""

    def is_quantised(file_name: str, tensor: Tensor) -> bool:
        return is_linear(file_name, tensor) and "in_proj" not in file_name

    save_both(case("falcon-h1"), modelopt("*mamba.in_proj"), fp8, tmp_path, is_quantised)
    logits, tokens = run(tmp_path / "quantised")
    expected, theirs = run(tmp_path / "float32")
    assert relative_error(logits, expected) <= TOLERANCE
    assert tokens == theirs


def test_names_in_files() -> None:
    names = names_in_files({"backbone.": "model.", ".mixer.q_": ".self_attn.q_"}, False, "model.0")
    assert set(names) == {"model.0", "backbone.0"}
    names = names_in_files({}, True, "model.layers.0.mlp.up_proj")
    assert "model.language_model.layers.0.mlp.up_proj" in names
    assert "language_model.model.layers.0.mlp.up_proj" in names
