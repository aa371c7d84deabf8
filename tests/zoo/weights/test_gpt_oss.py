"""gpt-oss in MXFP4, as it is released, against transformers with dequantised weights.

Planted once, and noticed: gate and up exchanged, the rows of gate and up in halves, the bias of
down added on both ranks, biases of gate and up not cut for a rank.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GptOssConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from helpers.family_cases import GPT_OSS, SIZES
from helpers.model_harness import make_reference, relative_error
from helpers.quantised import TOLERANCE, run, run_ranks, transformers_ids
from minisgl.errors import ConfigError

HIDDEN, INNER, NUM_EXPERTS = 64, 96, 5
QUANTIZATION = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With folders `quantised` and `float32`, which has the same numbers."""
    folder = tmp_path_factory.mktemp("gpt-oss")
    sizes: dict[str, Any] = {"hidden_size": HIDDEN, "intermediate_size": INNER}
    config = GptOssConfig(**{**SIZES, **GPT_OSS, **sizes})
    make_reference(config).save_pretrained(folder / "float32")
    file = folder / "float32" / "model.safetensors"
    plain = load_file(file)
    quantised: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(0)
    for name, tensor in plain.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            quantised[name] = tensor
            continue
        _, inputs, outputs = tensor.shape
        shape = (NUM_EXPERTS, outputs, inputs // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 126, shape, generator=generator, dtype=torch.uint8)
        quantised[f"{name}_blocks"], quantised[f"{name}_scales"] = blocks, scales
        plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
        assert plain[name].shape == tensor.shape
    save_file(plain, file, metadata={"format": "pt"})
    (folder / "quantised").mkdir()
    save_file(quantised, folder / "quantised" / "model.safetensors")
    values = json.loads((folder / "float32" / "config.json").read_text())
    values["quantization_config"] = QUANTIZATION
    (folder / "quantised" / "config.json").write_text(json.dumps(values))
    return folder


def test_mxfp4_logits_are_those_of_dequantised_weights(folder: Path) -> None:
    expected, tokens = run(folder / "float32")
    logits, ours = run(folder / "quantised")
    assert relative_error(logits, expected) <= TOLERANCE
    assert ours == tokens == transformers_ids(folder / "float32")


@pytest.mark.parametrize(("size", "options"), [(2, {}), (3, {}), (2, {"expert_parallel": True})])
@pytest.mark.parametrize("kind", ["quantised", "float32"])
def test_ranks_cut_experts_and_their_biases(
    kind: str, size: int, options: dict[str, Any], folder: Path
) -> None:
    """2 ranks: 64 and 32 columns of an expert, which groups of 32 do not cut."""
    expected, tokens = run(folder / "float32")
    for logits, ours in run_ranks(folder / kind, size, **options):
        assert relative_error(logits, expected) <= TOLERANCE
        assert ours == tokens


def test_more_ranks_than_groups_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="width 96, in blocks of 32, cannot be shared by 4 ranks"):
        run_ranks(folder / "quantised", 4)
