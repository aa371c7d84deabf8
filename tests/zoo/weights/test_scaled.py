"""fp8 and int8 with a scale for each matrix, row or group, in the spellings of their packers.

Planted once, and noticed: scales of rows reversed, int8 read as uint8.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, PreTrainedConfig, Qwen3MoeConfig

from helpers.family_cases import MOE, SIZES
from helpers.model_harness import relative_error
from helpers.quantised import (
    TOLERANCE,
    Quantise,
    run,
    run_ranks,
    save_both,
    save_quantised,
    transformers_ids,
)
from minisgl.errors import ConfigError
from minisgl.models.loading.reading import read_config

NOTICED = 0.02
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES, attention_bias=True),
    "qwen3-moe": Qwen3MoeConfig(**SIZES, **MOE),
}


def compressed(format: str, **weights: Any) -> dict[str, Any]:
    values = {"num_bits": 8, "symmetric": True, "dynamic": False, **weights}
    activations = {"num_bits": 8, "type": weights["type"], "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": values, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def scaled(
    number: torch.dtype, group: int | None, shaped: Callable[[Tensor], Tensor], *inputs: str
) -> Quantise:
    """A scale for each row and `group` columns (0 for all); None for the matrix."""
    most = 448 if number == torch.float8_e4m3fn else 127

    def quantised(module: str, tensor: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        height, width = tensor.shape
        shape = (1, 1, height * width) if group is None else (height, -1, group or width)
        groups = tensor.reshape(shape)
        scale = groups.abs().amax(-1) / most
        ratio = groups / scale[..., None]
        numbers = (ratio.round() if number == torch.int8 else ratio).to(number)
        dequantised = (numbers.float() * scale[..., None]).view(height, width)
        tensors = {"weight": numbers.view(height, width), "weight_scale": shaped(scale).clone()}
        return {**tensors, **{name: torch.ones(1) for name in inputs}}, dequantised

    return quantised


def same(scale: Tensor) -> Tensor:
    return scale


MODELOPT = {"quant_method": "modelopt", "exclude_modules": ["lm_head"]}
FP8 = torch.float8_e4m3fn
CASES: dict[str, tuple[dict[str, Any], Quantise]] = {
    "compressed-tensors-row": (
        compressed("float-quantized", type="float", strategy="channel"),
        scaled(FP8, 0, same),
    ),
    "compressed-tensors-int8-row": (
        compressed("int-quantized", type="int", strategy="channel"),
        scaled(torch.int8, 0, same),
    ),
    "compressed-tensors-int8-group": (
        compressed("int-quantized", type="int", strategy="group", group_size=12),
        scaled(torch.int8, 12, same),
    ),
    "modelopt": (
        {**MODELOPT, "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
        scaled(FP8, None, lambda scale: scale.reshape(()), "input_scale", "k_scale"),
    ),
    "modelopt-row": (
        {**MODELOPT, "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
        scaled(FP8, 0, lambda scale: scale[:, 0]),
    ),
    "fbgemm": (
        {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]},
        scaled(FP8, 0, same, "input_scale_ub"),
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_dequantised_weights(name: str, case: str, tmp_path: Path) -> None:
    quantization, quantise = CASES[case]
    save_both(CONFIGS[name], quantization, quantise, tmp_path)
    expected, tokens = run(tmp_path / "float32")
    logits, ours = run(tmp_path / "quantised")
    assert relative_error(logits, expected) <= TOLERANCE
    assert ours == tokens
    if name == "llama":
        assert ours == transformers_ids(tmp_path / "float32")
    for logits, ours in run_ranks(tmp_path / "quantised"):
        assert relative_error(logits, expected) <= TOLERANCE
        assert ours == tokens


def test_scales_of_other_rows_would_be_noticed(tmp_path: Path) -> None:
    tensors = save_both(CONFIGS["llama"], *CASES["compressed-tensors-int8-row"], tmp_path)
    expected, _ = run(tmp_path / "float32")
    name = "model.layers.0.mlp.down_proj.weight_scale"
    tensors[name] = tensors[name].flip(0)
    save_quantised(tensors, tmp_path)
    assert relative_error(run(tmp_path / "quantised")[0], expected) >= NOTICED


def test_a_share_that_cuts_a_group_is_refused(tmp_path: Path) -> None:
    quantization = compressed("int-quantized", type="int", strategy="group", group_size=48)
    save_both(CONFIGS["llama"], quantization, scaled(torch.int8, 24, same), tmp_path)
    with pytest.raises(ConfigError, match=r"o_proj: .* hold columns \d+ to \d+ of 48, .* of 48"):
        run_ranks(tmp_path / "quantised")


def test_modelopt_s_section_may_lack_the_method(tmp_path: Path) -> None:
    """As ModelOpt 0.31 wrote it to config.json."""
    quantization, quantise = CASES["modelopt"]
    values = {name: value for name, value in quantization.items() if name != "quant_method"}
    save_both(CONFIGS["llama"], values, quantise, tmp_path)
    expected, _ = run(tmp_path / "float32")
    assert relative_error(run(tmp_path / "quantised")[0], expected) <= TOLERANCE


def test_modelopt_s_own_file_is_read(tmp_path: Path) -> None:
    quantization, quantise = CASES["modelopt"]
    save_both(CONFIGS["llama"], quantization, quantise, tmp_path)
    expected, _ = run(tmp_path / "float32")
    file = tmp_path / "quantised" / "config.json"
    values = json.loads(file.read_text())
    section = values.pop("quantization_config")
    file.write_text(json.dumps(values))
    own = file.with_name("hf_quant_config.json")
    own.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": section}))
    assert relative_error(run(tmp_path / "quantised")[0], expected) <= TOLERANCE
    own.write_text(json.dumps({"quantization": {"quant_algo": "W4A8_AWQ"}}))
    with pytest.raises(ConfigError, match=r"hf_quant_config.json.*quant_algo is 'W4A8_AWQ', exp"):
        read_config(file.parent)
