"""MXFP4 as gpt-oss is released, and NVFP4 as compressed-tensors and ModelOpt write it.

`test_compressed_tensors.py` has MXFP4 of compressed-tensors.

Planted once, and noticed: nibbles swapped, the exponent's bias 128, groups one late, the rows of
`first` ignored, the matrix scale multiplied where compressed-tensors divides.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from helpers.family_cases import SIZES
from helpers.model_harness import CPU, relative_error
from helpers.quantised import (
    TOLERANCE,
    Quantise,
    read_formats,
    run,
    run_ranks,
    save_both,
    save_quantised,
    transformers_ids,
)
from minisgl.errors import ConfigError
from minisgl.kernel.ops import Ops
from minisgl.models import load_weight
from minisgl.models.loading.weight import Checkpoint
from minisgl.quantization import PLAIN, Part, Stack, Weight
from minisgl.quantization.weight import WeightBuild
from minisgl_zoo.weights.fp4 import Fp4

NOTICED = 0.02
NUM_EXPERTS, OUT, IN = 3, 10, 96


def save_mxfp4(folder: Path) -> Tensor:
    """Returns the experts as transformers dequantises them, [E, O, I]."""
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(
        0, 256, (NUM_EXPERTS, OUT, IN // 32, 16), generator=generator, dtype=torch.uint8
    )
    scales = torch.randint(
        118, 130, (NUM_EXPERTS, OUT, IN // 32), generator=generator, dtype=torch.uint8
    )
    save_file({"up_blocks": blocks, "up_scales": scales}, folder / "model.safetensors")
    return convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)


def load_experts(
    folder: Path, rows: range, columns: range, held: range = range(NUM_EXPERTS)
) -> Weight:
    """The experts of a rank, of each expert `rows` or `columns`."""
    axis, share = (0, rows) if len(rows) < OUT else (1, columns)
    parts = [
        Part(
            name=f"experts.{index}.up.weight",
            shape=(OUT, IN),
            axis=axis if index in held else 0,
            share=share if index in held else range(0),
            stack=Stack("up", (NUM_EXPERTS, OUT, IN), index, 0),
        )
        for index in range(NUM_EXPERTS)
    ]
    weight = Fp4(spelling="gpt-oss")(
        WeightBuild(ops=Ops(), dtype=torch.float32, parts=parts, stacked=len(held))
    )
    load_weight(weight, Checkpoint(folder), device=CPU, ops=Ops())
    return weight


def test_mxfp4_is_what_transformers_dequantises(tmp_path: Path) -> None:
    expected = save_mxfp4(tmp_path)
    weight = load_experts(tmp_path, range(OUT), range(IN))
    assert torch.equal(weight.dense(), expected)
    assert torch.equal(weight[1].dense(), expected[1])
    held = sum(p.num_bytes for p in weight.parameters())
    assert held == NUM_EXPERTS * OUT * (IN // 2 + IN // 32)


def test_ranks_share_rows_columns_or_experts_of_mxfp4(tmp_path: Path) -> None:
    expected = save_mxfp4(tmp_path)
    assert torch.equal(load_experts(tmp_path, range(4, OUT), range(IN)).dense(), expected[:, 4:])
    assert torch.equal(
        load_experts(tmp_path, range(OUT), range(32, IN)).dense(), expected[..., 32:]
    )
    assert torch.equal(
        load_experts(tmp_path, range(OUT), range(IN), range(1, 3)).dense(), expected[1:]
    )
    with pytest.raises(ConfigError, match=r"would hold columns 16 to 96 of 96, .* in units of 32"):
        load_experts(tmp_path, range(OUT), range(16, IN))


def test_gate_and_up_may_be_parts_of_one_stack(tmp_path: Path) -> None:
    expected = save_mxfp4(tmp_path)
    parts = [
        Part(
            name=f"experts.{index}.{name}.weight",
            shape=(OUT // 2, IN),
            axis=0,
            share=range(1, OUT // 2),
            stack=Stack("up", (NUM_EXPERTS, OUT, IN), index, first),
        )
        for index in range(NUM_EXPERTS)
        for name, first in (("gate", 0), ("up", OUT // 2))
    ]
    weight = Fp4(spelling="gpt-oss")(
        WeightBuild(ops=Ops(), dtype=torch.bfloat16, parts=parts, stacked=NUM_EXPERTS)
    )
    load_weight(weight, Checkpoint(tmp_path), device=CPU, ops=Ops())
    rows = [*range(1, OUT // 2), *range(OUT // 2 + 1, OUT)]
    assert torch.equal(weight.dense(), expected[:, rows].bfloat16())


def test_mxfp4_is_for_the_experts_alone() -> None:
    quantization = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
    }
    formats = read_formats(quantization, "config.json")
    expert = formats.of(["model.layers.3.mlp.experts.7.gate_up_proj"], "Linear")
    assert expert.weight == Fp4(spelling="gpt-oss")
    assert expert.unit == 32
    for module in ("model.layers.3.self_attn.q_proj", "model.layers.3.mlp.router", "lm_head"):
        assert formats.of([module], "Linear") is PLAIN


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def nvfp4(spelling: str) -> Quantise:
    """NVIDIA's recipe: amax of a group / 6 in fp8, of which the matrix's largest is 448."""

    def quantised(module: str, tensor: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        height, width = tensor.shape
        groups = tensor.view(height, width // 16, 16)
        matrix_scale = tensor.abs().amax() / (6 * 448)
        scale = (groups.abs().amax(-1) / 6 / matrix_scale).to(torch.float8_e4m3fn)
        spread = (scale.float() * matrix_scale)[..., None]
        ratio = groups / spread
        index = (ratio.abs()[..., None] - E2M1).abs().argmin(-1)
        dequantised = (E2M1[index] * ratio.sign() * spread).view(height, width)
        nibbles = (index | (ratio < 0).long() << 3).to(torch.uint8).view(height, width)
        packed = nibbles[:, ::2] | nibbles[:, 1::2] << 4
        if spelling == "modelopt":
            tensors = {"weight": packed, "weight_scale_2": matrix_scale.reshape(())}
        else:
            tensors = {"weight_packed": packed, "weight_global_scale": 1 / matrix_scale.reshape(1)}
        return {**tensors, "weight_scale": scale}, dequantised

    return quantised


MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}
COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "float",
                "strategy": "tensor_group",
                "group_size": 16,
                "symmetric": True,
                "dynamic": False,
            },
        }
    },
}
CONFIG = LlamaConfig(**{**SIZES, "hidden_size": 64, "intermediate_size": 96})


@pytest.mark.parametrize("spelling", ["modelopt", "compressed-tensors"])
def test_nvfp4_logits_are_those_of_dequantised_weights(spelling: str, tmp_path: Path) -> None:
    quantization = MODELOPT if spelling == "modelopt" else COMPRESSED
    save_both(CONFIG, quantization, nvfp4(spelling), tmp_path)
    expected, tokens = run(tmp_path / "float32")
    logits, ours = run(tmp_path / "quantised")
    assert relative_error(logits, expected) <= TOLERANCE
    assert ours == tokens == transformers_ids(tmp_path / "float32")
    for logits, ours in run_ranks(tmp_path / "quantised"):
        assert relative_error(logits, expected) <= TOLERANCE
        assert ours == tokens


@pytest.mark.parametrize("mistake", ["nibbles", "groups", "matrix scales"])
def test_a_mistake_in_nvfp4_would_be_noticed(mistake: str, tmp_path: Path) -> None:
    tensors = save_both(CONFIG, MODELOPT, nvfp4("modelopt"), tmp_path)
    expected, _ = run(tmp_path / "float32")
    name = "model.layers.0.mlp.down_proj"
    if mistake == "nibbles":
        packed = tensors[f"{name}.weight"]
        tensors[f"{name}.weight"] = packed >> 4 | packed << 4
    elif mistake == "groups":
        tensors[f"{name}.weight_scale"] = tensors[f"{name}.weight_scale"].roll(1, -1)
    else:
        tensors[f"{name}.weight_scale_2"] = tensors[f"{name}.weight_scale_2"] * 1.1
    save_quantised(tensors, tmp_path)
    assert relative_error(run(tmp_path / "quantised")[0], expected) >= NOTICED / 4


def test_inputs_that_are_no_whole_groups_are_refused(tmp_path: Path) -> None:
    config = LlamaConfig(**{**SIZES, "hidden_size": 64, "intermediate_size": 72})
    config.save_pretrained(tmp_path)
    part = Part.whole("down_proj.weight", 64, 72)
    with pytest.raises(ConfigError, match=r"down_proj has 72 inputs, .* groups of 16; expected a"):
        Fp4(spelling="modelopt")(WeightBuild(ops=Ops(), dtype=torch.float32, parts=[part]))
