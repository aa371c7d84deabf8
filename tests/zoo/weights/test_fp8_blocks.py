"""fp8 with a scale for each block of 128 x 128, as Qwen3's and DeepSeek's checkpoints have it.

Planted once, and noticed: columns of scales in reverse, rows of scales one late, every rank with
the first rank's scales.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    CohereConfig,
    DeepseekV3Config,
    LlamaConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from helpers.family_cases import MOE
from helpers.model_harness import load, relative_error
from helpers.quantised import (
    HALF_BLOCKS,
    TOLERANCE,
    is_linear,
    run,
    run_ranks,
    save_both,
    save_quantised,
    transformers_ids,
)
from minisgl.errors import ConfigError
from minisgl_zoo.weights.scaled import ScaledWeight

NOTICED = 0.02
"""What a mistake changes, at least: 2,000 times as much."""
BLOCK = 128
NORMS = ("pre_fc_norm_embedding", "pre_fc_norm_hidden")
# Tensors of q, k and v, and of gate and up, whose parts are whole blocks.
FUSED = {name: size for name, size in HALF_BLOCKS.items() if name != "head_dim"}
FUSED |= {"hidden_size": 512, "intermediate_size": 256}
LARGE_MOE = {**HALF_BLOCKS, **MOE, "moe_intermediate_size": 192}

CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**HALF_BLOCKS, attention_bias=True),
    "qwen3-tied": Qwen3Config(**{**HALF_BLOCKS, "tie_word_embeddings": True}),
    "qwen2-moe": Qwen2MoeConfig(
        **{k: v for k, v in LARGE_MOE.items() if k != "head_dim"} | {"hidden_size": 512},
        shared_expert_intermediate_size=320,
    ),
    "qwen3-moe": Qwen3MoeConfig(**LARGE_MOE),
    "phi3": Phi3Config(**FUSED),
    "cohere": CohereConfig(**HALF_BLOCKS, logit_scale=0.25),
}
DEEPSEEK = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [BLOCK, BLOCK],
}
"""That of DeepSeek-V3, DeepSeek-R1 and Kimi K2, as released: no list of plain modules, and routers
are plain. DeepSeek-V3.1 has `scale_fmt`, too."""
QWEN = {
    **DEEPSEEK,
    "modules_to_not_convert": ["lm_head", "mlp.gate", "mlp.shared_expert_gate"],
}
WEIGHTS = {
    "num_bits": 8,
    "type": "float",
    "strategy": "block",
    "block_structure": [BLOCK, BLOCK],
    "symmetric": True,
    "dynamic": False,
}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "ignore": ["lm_head"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
}


def quantise(scale_name: str) -> Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor]]:
    def quantised(_module: str, tensor: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        height, width = tensor.shape
        numbers = torch.empty(tensor.shape, dtype=torch.float8_e4m3fn)
        dequantised = torch.empty_like(tensor)
        scales = torch.empty(-(-height // BLOCK), -(-width // BLOCK), dtype=torch.bfloat16)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                rows = slice(i * BLOCK, (i + 1) * BLOCK)
                block = (rows, slice(j * BLOCK, (j + 1) * BLOCK))
                # No two neighbours' are alike.
                scales[i, j] = tensor[block].abs().amax() / 448 * (1 + (i + 2 * j) % 5)
                scale = scales[i, j].float()
                numbers[block] = (tensor[block] / scale).to(torch.float8_e4m3fn)
                dequantised[block] = numbers[block].float() * scale
        return {"weight": numbers, scale_name: scales}, dequantised

    return quantised


@pytest.mark.parametrize(
    ("name", "spelling"),
    [
        *((name, "qwen") for name in CONFIGS),
        ("qwen3-moe", "compressed-tensors"),
        ("llama", "minimax"),
    ],
)
def test_logits_are_those_of_dequantised_weights(name: str, spelling: str, tmp_path: Path) -> None:
    if spelling == "compressed-tensors":
        save_both(CONFIGS[name], COMPRESSED, quantise("weight_scale"), tmp_path)
    else:
        values = {**QWEN, "fmt": "e4m3" if spelling == "qwen" else "float8_e4m3fn"}
        save_both(CONFIGS[name], values, quantise("weight_scale_inv"), tmp_path)
    expected, tokens = run(tmp_path / "float32")
    logits, ours = run(tmp_path / "quantised")
    assert relative_error(logits, expected) <= TOLERANCE
    assert ours == tokens == transformers_ids(tmp_path / "float32")


@pytest.mark.parametrize("more", [{}, {"scale_fmt": "ue8m0"}], ids=["V3", "V3.1"])
def test_deepseek_as_released(more: dict[str, str], tmp_path: Path) -> None:
    """All linear layers but routers and the LM head are quantised, and the files have a layer of
    multi-token prediction after the last."""
    sizes = {**HALF_BLOCKS, **MOE, "num_hidden_layers": 2, "moe_intermediate_size": 192}
    latents = {"q_lora_rank": 128, "kv_lora_rank": 160, "qk_nope_head_dim": 128, "v_head_dim": 128}
    config = DeepseekV3Config(
        **{name: size for name, size in sizes.items() if name not in ("num_experts", "head_dim")}
        | latents
        | {"qk_rope_head_dim": 64, "num_key_value_heads": 4, "n_routed_experts": 8},
        first_k_dense_replace=1,
        n_group=4,
        topk_group=2,
        num_nextn_predict_layers=1,
    )
    quantise_block = quantise("weight_scale_inv")
    tensors = save_both(config, {**DEEPSEEK, **more}, quantise_block, tmp_path)
    quantised = {name for name in tensors if name.endswith("_scale_inv")}
    assert f"{LAYER}.self_attn.kv_b_proj.weight_scale_inv" in quantised
    assert not any(".mlp.gate." in name for name in quantised)
    layer = {name: tensors[name].clone() for name in tensors if "layers.1." in name}
    drafts = {name.replace("layers.1.", "layers.2."): layer[name] for name in layer}
    norms, size = ("enorm", "hnorm", "shared_head.norm"), config.hidden_size
    plain = {f"model.layers.2.{name}.weight": torch.ones(size) for name in norms}
    plain["model.layers.2.eh_proj.weight"] = torch.ones(size, 2 * size)
    save_quantised({**tensors, **drafts, **plain}, tmp_path)
    expected, tokens = run(tmp_path / "float32")
    logits, ours = run(tmp_path / "quantised")
    assert relative_error(logits, expected) <= TOLERANCE
    assert ours == tokens == transformers_ids(tmp_path / "float32")
    for logits, ours in run_ranks(tmp_path / "quantised"):
        assert relative_error(logits, expected) <= TOLERANCE
        assert ours == tokens
    assert load(tmp_path / "quantised", mtp=True).mtp, "its projection is not quantised"


@pytest.mark.parametrize("is_quantised", [False, True])
def test_multi_token_prediction_of_qwen_may_be_plain(is_quantised: bool, tmp_path: Path) -> None:
    """config.json need not list it. Its projection is always plain."""
    sizes = {**HALF_BLOCKS, "num_hidden_layers": 1, "layer_types": ["full_attention"]}
    tensors = save_both(Qwen3_5TextConfig(**sizes), QWEN, quantise("weight_scale_inv"), tmp_path)
    plain = load_file(tmp_path / "float32" / "model.safetensors")
    layer, norm = tensors if is_quantised else plain, plain["model.norm.weight"]
    named = {name.replace("model.", "mtp."): each.clone() for name, each in layer.items()}
    drafts = {name: each for name, each in named.items() if name.startswith("mtp.layers.")}
    drafts |= {f"mtp.{name}.weight": norm.clone() for name in ("norm", *NORMS)}
    drafts["mtp.fc.weight"] = torch.ones(len(norm), 2 * len(norm))
    save_quantised({**tensors, **drafts}, tmp_path)
    model: Any = load(tmp_path / "quantised", mtp=True)
    block = model.mtp.block
    for weight in (block.mlp.down.weight, block.attention.out.weight, block.mlp.gate_up.weight):
        assert isinstance(weight, ScaledWeight) == is_quantised
    assert not isinstance(model.mtp.project.weight, ScaledWeight)


@pytest.mark.parametrize(
    ("name", "expert_parallel"), [("llama", False), ("qwen3-moe", False), ("qwen2-moe", True)]
)
def test_two_ranks_share_whole_blocks(name: str, expert_parallel: bool, tmp_path: Path) -> None:
    save_both(CONFIGS[name], QWEN, quantise("weight_scale_inv"), tmp_path)
    expected, tokens = run(tmp_path / "float32")
    for logits, ours in run_ranks(tmp_path / "quantised", expert_parallel=expert_parallel):
        assert relative_error(logits, expected) <= TOLERANCE
        assert ours == tokens


def test_a_fused_layer_whose_blocks_would_be_cut_is_refused(tmp_path: Path) -> None:
    """Gate and up of 320, which is half a block more than two."""
    config = Phi3Config(**{**FUSED, "intermediate_size": 320})
    save_both(config, QWEN, quantise("weight_scale_inv"), tmp_path)
    message = r"gate_up_proj.weight_scale_inv \[5, 4\] cannot be cut into layers of 320, 320"
    with pytest.raises(ConfigError, match=message):
        load(tmp_path / "quantised")


def test_a_share_that_cuts_a_block_is_refused(tmp_path: Path) -> None:
    """Two heads of keys of 64: a rank would have half a block."""
    config = LlamaConfig(**{**HALF_BLOCKS, "head_dim": 64})
    save_both(config, QWEN, quantise("weight_scale_inv"), tmp_path)
    run(tmp_path / "quantised")
    message = r"k_proj: a rank would hold rows \d+ to \d+ of 128, .* in units of 128.*fewer ranks"
    with pytest.raises(ConfigError, match=message):
        run_ranks(tmp_path / "quantised")


def test_a_layer_of_too_few_blocks_is_refused(tmp_path: Path) -> None:
    config = LlamaConfig(**{**HALF_BLOCKS, "intermediate_size": 128})
    save_both(config, QWEN, quantise("weight_scale_inv"), tmp_path)
    with pytest.raises(ConfigError, match=r"width 128, in blocks of 128, cannot be shared by 2"):
        run_ranks(tmp_path / "quantised")


def test_the_ignore_list_keeps_modules_plain(tmp_path: Path) -> None:
    ignored = "model.layers.1.mlp.down_proj"
    quantization = {**QWEN, "modules_to_not_convert": ["lm_head", ignored]}
    save_both(
        CONFIGS["llama"],
        quantization,
        quantise("weight_scale_inv"),
        tmp_path,
        lambda name, tensor: is_linear(name, tensor) and ignored not in name,
    )
    expected, _ = run(tmp_path / "float32")
    assert relative_error(run(tmp_path / "quantised")[0], expected) <= TOLERANCE


def test_the_numbers_stay_in_8_bits(tmp_path: Path) -> None:
    save_both(CONFIGS["qwen3-moe"], QWEN, quantise("weight_scale_inv"), tmp_path)
    matrices = [n for n in load(tmp_path / "quantised").walk() if isinstance(n, ScaledWeight)]
    assert len(matrices) == 2 * 4  # q/k/v, o, gate/up and down of each layer
    for weight in matrices:
        assert weight.tensor.dtype == torch.float8_e4m3fn
        assert weight.scale.nbytes <= weight.tensor.nbytes / 1024


LAYER = "model.layers.0"


def swap_blocks(tensors: dict[str, Tensor]) -> None:
    name = f"{LAYER}.mlp.down_proj.weight_scale_inv"
    tensors[name] = tensors[name].flip(1)


def shift_blocks(tensors: dict[str, Tensor]) -> None:
    name = f"{LAYER}.self_attn.q_proj.weight_scale_inv"
    tensors[name] = tensors[name].roll(1, 0)


def transpose_blocks(tensors: dict[str, Tensor]) -> None:
    name = f"{LAYER}.mlp.down_proj.weight_scale_inv"  # [2, 3]
    tensors[name] = tensors[name].T.reshape(2, 3)


@pytest.mark.parametrize("mistake", [swap_blocks, shift_blocks, transpose_blocks])
def test_a_scale_of_another_block_would_be_noticed(
    mistake: Callable[[dict[str, Tensor]], None], tmp_path: Path
) -> None:
    tensors = save_both(CONFIGS["llama"], QWEN, quantise("weight_scale_inv"), tmp_path)
    expected, _ = run(tmp_path / "float32")
    mistake(tensors)
    save_quantised(tensors, tmp_path)
    assert relative_error(run(tmp_path / "quantised")[0], expected) >= NOTICED


def test_the_start_says_that_weights_are_dequantised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_both(CONFIGS["llama"], QWEN, quantise("weight_scale_inv"), tmp_path)
    with caplog.at_level("INFO", logger="minisgl.minisgl_zoo.weights.quantised"):
        load(tmp_path / "quantised")
    assert caplog.messages == [
        "weights in fp8 (e4m3), a scale for each block of 128 x 128 are dequantised in each GEMM: "
        "this saves memory and costs time"
    ]
