"""Checkpoints that compressed-tensors packs: logits are those of what it unpacks, in float32.

Planted once in the saved tensors of each case, and noticed: nibbles or bytes of a word exchanged.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig

from helpers.quantised import TOLERANCE

pytest.importorskip("compressed_tensors", reason="the packer is not installed")

from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

from helpers.family_cases import SIZES
from helpers.model_harness import make_reference, relative_error
from helpers.quantised import run, save_quantised, transformers_ids

NOTICED = 0.02
CONFIG = LlamaConfig(
    **{
        **SIZES,
        "hidden_size": 64,
        "intermediate_size": 128,
        "head_dim": 32,
        "num_attention_heads": 2,
    }
)
TOKENS = {"strategy": "token", "dynamic": True, "symmetric": True, "num_bits": 8}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "int4": ("pack-quantized", {**INT4, "symmetric": True}, None),
    "int4 zeros": ("pack-quantized", {**INT4, "symmetric": False}, None),
    "int8": (
        "int-quantized",
        {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
        {**TOKENS, "type": "int"},
    ),
    "fp8 channel": ("float-quantized", {**FP8, "strategy": "channel"}, {**TOKENS, "type": "float"}),
    "fp8 tensor": ("float-quantized", {**FP8, "strategy": "tensor"}, None),
    "fp8 block": (
        "float-quantized", {**FP8, "strategy": "block", "block_structure": [32, 32]}, None,
    ),
    "MXFP4": (
        "mxfp4-pack-quantized",
        {
            "num_bits": 4, "type": "float", "strategy": "group", "group_size": 32,
            "symmetric": True, "dynamic": False, "scale_dtype": torch.uint8,
        },
        None,
    ),
    "NVFP4": (
        "nvfp4-pack-quantized",
        {
            "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
            "symmetric": True, "dynamic": False, "scale_dtype": torch.float8_e4m3fn,
        },
        None,
    ),
}  # fmt: skip


def set_scales(linear: Any) -> None:
    """By absolute maximum, or by both ends where zeros are free."""
    args, scale = linear.quantization_scheme.weights, linear.weight_scale
    parts = scale.shape if scale.dim() == 2 else (1, 1)
    tiles = linear.weight.view(
        parts[0], linear.weight.shape[0] // parts[0], parts[1], linear.weight.shape[1] // parts[1]
    )
    ends = tiles.amin((1, 3)), tiles.amax((1, 3))
    outer = None
    if hasattr(linear, "weight_global_scale"):
        outer = generate_gparam(linear.weight.min(), linear.weight.max())
        linear.weight_global_scale.data.copy_(outer)
    values, zeros = calculate_qparams(*ends, args, outer)
    scale.data.copy_(values.view(scale.shape))
    if hasattr(linear, "weight_zero_point"):
        linear.weight_zero_point.data.copy_(zeros.view(scale.shape))


def unpack_nvfp4(model: torch.nn.Module, plain: torch.nn.Module) -> None:
    """The packer's own way rounds to bfloat16, so its parts are called in float32."""
    for name, module in model.named_modules():
        if getattr(module, "quantization_scheme", None):
            linear: Any = module
            target = plain.get_submodule(name).weight
            numbers = unpack_fp4_from_uint8(linear.weight_packed, *target.shape, torch.float32)
            target.data = dequantize(
                numbers,
                linear.weight_scale.float(),
                args=linear.quantization_scheme.weights,
                global_scale=linear.weight_global_scale,
            )


def save(case: str, folder: Path) -> None:
    """The packed checkpoint to `folder`/quantised, the unpacked one to `folder`/float32."""
    format, weights, activations = CASES[case]
    model = make_reference(CONFIG)
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    config = QuantizationConfig(
        config_groups={"group_0": group}, ignore=["lm_head"], format=format,
        quantization_status="initialized",
    )  # fmt: skip
    apply_quantization_config(model, config, show_progress=False)
    for module in model.modules():
        if getattr(module, "quantization_scheme", None):
            set_scales(module)
    compressor = ModelCompressor.from_pretrained_model(model, format)
    compressor.compress_model(model)
    model.save_pretrained(folder / "quantised")
    compressor.update_config(folder / "quantised")
    plain = make_reference(CONFIG)
    if case == "NVFP4":
        unpack_nvfp4(model, plain)
    else:
        compressor.decompress_model(model)
        names = dict(plain.named_parameters())
        plain.load_state_dict({name: x for name, x in model.state_dict().items() if name in names})
    plain.save_pretrained(folder / "float32")


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_unpacked_weights(case: str, tmp_path: Path) -> None:
    save(case, tmp_path)
    got, ours = run(tmp_path / "quantised")
    want, tokens = run(tmp_path / "float32")
    assert relative_error(got, want) <= TOLERANCE
    assert ours == tokens == transformers_ids(tmp_path / "float32")


@pytest.mark.parametrize("case", CASES)
def test_bytes_at_another_place_would_be_noticed(case: str, tmp_path: Path) -> None:
    save(case, tmp_path)
    tensors = load_file(tmp_path / "quantised" / "model.safetensors")
    name = next(
        name for name in tensors if name.endswith(("down_proj.weight", "down_proj.weight_packed"))
    )
    rows: Tensor = tensors[name].view(torch.uint8)
    tensors[name] = rows.unflatten(1, (-1, 2)).flip(2).reshape(rows.shape).view(tensors[name].dtype)
    save_quantised(tensors, tmp_path)
    assert relative_error(run(tmp_path / "quantised")[0], run(tmp_path / "float32")[0]) > NOTICED
