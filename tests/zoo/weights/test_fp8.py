"""fp8 per tensor: our logits are those of the same weights dequantised to float32."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, PreTrainedConfig, Qwen2MoeConfig, Qwen3Config, Qwen3MoeConfig

from helpers.family_cases import MOE, SIZES
from helpers.local_ranks import ranks
from helpers.model_harness import Runner, Sequence, load, make_reference, random_ids, relative_error
from helpers.quantised import TOLERANCE
from minisgl.errors import CheckpointError, ConfigError
from minisgl.models.loading.reading import read_config
from minisgl.quantization import PLAIN
from minisgl_zoo.weights.rules import Section, excluded
from minisgl_zoo.weights.scaled import ScaledWeight

NOTICED = 0.02
"""What a mistake changes, at least: 2,000 times as much."""

ACTIVATIONS = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
WEIGHTS = {**ACTIVATIONS, "symmetric": True}
IGNORED = ("lm_head", "model.layers.1.mlp.down_proj")


def compressed_tensors(**group: Any) -> dict[str, Any]:
    values = {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": None, **group}
    return {
        "quant_method": "compressed-tensors",
        "format": "naive-quantized",
        "ignore": ["lm_head", r"re:.*\.1\.mlp\.down_proj$"],
        "config_groups": {"group_0": values},
        "kv_cache_scheme": None,
    }


def scalar(scale: Tensor) -> Tensor:
    return scale.reshape(())


# name -> (quantization_config, the scale's name, its shape, the input scale's name)
SPELLINGS: dict[str, tuple[dict[str, Any], str, Callable[[Tensor], Tensor], str | None]] = {
    "compressed-tensors": (
        compressed_tensors(input_activations=ACTIVATIONS),
        "weight_scale", lambda x: x, "input_scale",
    ),
    "compressed-tensors-weights": (compressed_tensors(), "weight_scale", scalar, None),
    "transformers": (
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": None,
            "modules_to_not_convert": list(IGNORED),
        },
        "weight_scale_inv", scalar, None,
    ),
    "autofp8": (
        {
            "quant_method": "fp8",
            "activation_scheme": "static",
            "ignored_layers": ["lm_head", "layers.1.mlp.down_proj"],
        },
        "weight_scale", scalar, "input_scale",
    ),
}  # fmt: skip

CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES, attention_bias=True),
    "qwen3-tied": Qwen3Config(**{**SIZES, "tie_word_embeddings": True}),
    "qwen2-moe": Qwen2MoeConfig(**SIZES, **MOE, shared_expert_intermediate_size=24),
    "qwen3-moe": Qwen3MoeConfig(**SIZES, **MOE),
}


def is_quantised(name: str, tensor: Tensor) -> bool:
    module = name.removesuffix(".weight")
    return tensor.dim() == 2 and "embed" not in name and module not in IGNORED


def save_fp8(config: PreTrainedConfig, spelling: str, folder: Path) -> dict[str, Tensor]:
    """Save a random model in fp8 to `folder`/fp8 and dequantised to `folder`/float32. Returns the
    tensors of the former."""
    quantization, scale_name, shaped, input_scale = SPELLINGS[spelling]
    make_reference(config).save_pretrained(folder / "float32", save_original_format=True)
    file = folder / "float32" / "model.safetensors"
    dequantised, quantised = load_file(file), {}
    for index, (name, tensor) in enumerate(sorted(dequantised.items())):
        if not is_quantised(name, tensor):
            quantised[name] = tensor
            continue
        scale = tensor.abs().amax().reshape(1) / 448 * (1 + index % 5)  # no two neighbours' alike
        quantised[name] = (tensor / scale).to(torch.float8_e4m3fn)
        quantised[name.removesuffix("weight") + scale_name] = shaped(scale).clone()
        if input_scale:
            quantised[name.removesuffix("weight") + input_scale] = shaped(scale).clone()
        dequantised[name] = quantised[name].float() * scale
    save_file(dequantised, file)
    (folder / "fp8").mkdir()
    save_file(quantised, folder / "fp8" / "model.safetensors")
    values = json.loads((folder / "float32" / "config.json").read_text())
    values["quantization_config"] = quantization
    (folder / "fp8" / "config.json").write_text(json.dumps(values))
    return quantised


def run(folder: Path, **options: Any) -> tuple[Tensor, list[int]]:
    """Logits of a prompt and of greedy tokens, and these."""
    with torch.inference_mode():
        sequence = Sequence(random_ids(19, 3), 6)
        Runner(load(folder, **options), page_size=4).generate([sequence], chunk=7)
    return torch.cat(sequence.logits), sequence.outputs


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_dequantised_weights(name: str, spelling: str, tmp_path: Path) -> None:
    save_fp8(CONFIGS[name], spelling, tmp_path)
    expected, tokens = run(tmp_path / "float32")
    logits, ours = run(tmp_path / "fp8")
    assert relative_error(logits, expected) <= TOLERANCE
    assert ours == tokens


@pytest.mark.parametrize(
    ("name", "expert_parallel"),
    [*((name, False) for name in CONFIGS), ("qwen2-moe", True), ("qwen3-moe", True)],
)
def test_two_ranks_share_a_matrix_and_its_scale(
    name: str, expert_parallel: bool, tmp_path: Path
) -> None:
    save_fp8(CONFIGS[name], "compressed-tensors", tmp_path)
    expected, tokens = run(tmp_path / "float32")
    with ThreadPoolExecutor(2) as pool:
        together = pool.map(
            lambda comm: run(tmp_path / "fp8", comm=comm, expert_parallel=expert_parallel), ranks(2)
        )
        for logits, ours in together:
            assert relative_error(logits, expected) <= TOLERANCE
            assert ours == tokens


def test_bfloat16_activations_round_the_dequantised_weight_once(tmp_path: Path) -> None:
    save_fp8(CONFIGS["llama"], "autofp8", tmp_path)
    expected, _ = run(tmp_path / "float32", dtype=torch.bfloat16)
    assert torch.equal(run(tmp_path / "fp8", dtype=torch.bfloat16)[0], expected)


LAYER = "model.layers.0"


def swap(one: str, other: str) -> Callable[[dict[str, Tensor]], None]:
    def swapped(tensors: dict[str, Tensor]) -> None:
        tensors[one], tensors[other] = tensors[other], tensors[one]

    return swapped


def transpose(tensors: dict[str, Tensor]) -> None:
    name = f"{LAYER}.self_attn.o_proj.weight"
    tensors[name] = tensors[name].T.contiguous()


@pytest.mark.parametrize(
    "mistake",
    [
        swap(f"{LAYER}.self_attn.q_proj.weight_scale", f"{LAYER}.self_attn.k_proj.weight_scale"),
        swap(f"{LAYER}.mlp.gate_proj.weight_scale", f"{LAYER}.mlp.up_proj.weight_scale"),
        swap(f"{LAYER}.mlp.down_proj.weight_scale", f"{LAYER}.self_attn.o_proj.weight_scale"),
        transpose,
    ],
    ids=["scales-of-q-and-k", "scales-of-gate-and-up", "scales-of-down-and-o", "transposed"],
)
def test_a_swapped_scale_or_a_transposed_weight_would_be_noticed(
    mistake: Callable[[dict[str, Tensor]], None], tmp_path: Path
) -> None:
    tensors = save_fp8(CONFIGS["llama"], "compressed-tensors", tmp_path)
    expected, _ = run(tmp_path / "float32")
    mistake(tensors)
    save_file(tensors, tmp_path / "fp8" / "model.safetensors")
    assert relative_error(run(tmp_path / "fp8")[0], expected) >= NOTICED


def test_a_rank_holds_a_byte_for_a_number(tmp_path: Path) -> None:
    save_fp8(CONFIGS["llama"], "compressed-tensors", tmp_path)
    model = load(tmp_path / "fp8")
    matrices = [node for node in model.walk() if isinstance(node, ScaledWeight)]
    # Of each layer q/k/v, o, gate/up and down; the second's down is ignored.
    assert len(matrices) == 2 * 4 - 1
    for weight in matrices:
        held = sum(p.num_bytes for p in weight.parameters())
        assert held == weight.tensor.numel() + 4 * len(weight.scale)
        assert weight.tensor.dtype == torch.float8_e4m3fn
    assert model.num_weight_bytes == sum(
        getattr(p.owner, p.attr).nbytes for p in model.parameters()
    ) + sum(node.num_buffer_bytes for node in model.walk())


def test_what_is_missing_or_not_fp8_is_named(tmp_path: Path) -> None:
    tensors = save_fp8(CONFIGS["llama"], "compressed-tensors", tmp_path)
    name = f"{LAYER}.mlp.up_proj"
    tensors[f"{name}.weight"] = tensors[f"{name}.weight"].to(torch.bfloat16)
    del tensors[f"{name}.weight_scale"]
    tensors[f"{name}.zero_point"] = torch.zeros(1)
    save_file(tensors, tmp_path / "fp8" / "model.safetensors")
    with pytest.raises(CheckpointError) as error:
        load(tmp_path / "fp8")
    message = str(error.value)
    assert f"quantised: {name}.weight is BF16, expected one of ['F8_E4M3']" in message
    assert f"missing: {name}.weight_scale [1]" in message
    assert f"extra: {name}.zero_point [1]" in message
    assert "3 tensors differ" in message  # the input scale is no extra one


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ("fp8", "must be a JSON object, got 'fp8'"),
        ({"quant_method": "hqq"}, "quant_method is 'hqq', expected compressed-tensors or fp8"),
        ({"quant_method": {"fp8": 1}}, "quant_method is {.fp8.: 1}, expected compressed-tensors"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"is \[128\], expected two positive"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt is 'e5m2', expected None or 'e4m3'"),
        ({"quant_method": "fp8", "activation_scheme": "x"}, "activation_scheme is 'x', expected"),
        ({"quant_method": "fp8", "ignored_layers": "lm_head"}, "must be a list of strings"),
        ({"quant_method": "fp8", "ignored_layers": ["("]}, r"'\(' is no regular expression"),
        ({"quant_method": "compressed-tensors"}, "config_groups must be a JSON object, got None"),
        (compressed_tensors(weights={**WEIGHTS, "num_bits": 6}), "num_bits is 6, expected 8"),
        (compressed_tensors(weights={**WEIGHTS, "type": "x"}), "type is 'x', expected 'float' or"),
        (compressed_tensors(weights={**WEIGHTS, "type": "int"}), "format is 'naive-quantized', ex"),
        (compressed_tensors(weights={**WEIGHTS, "strategy": "x"}), "'x', expected 'tensor' or"),
        (compressed_tensors(weights={**WEIGHTS, "strategy": "block"}), "block_structure is None"),
        (compressed_tensors(input_activations={"type": "int"}), "is 'int', expected 'float'"),
        (
            {**compressed_tensors(), "kv_cache_scheme": {"num_bits": 8, "type": "int"}},
            "type is 'int'",
        ),
        ({**compressed_tensors(), "sparsity_config": {"format": "24"}}, "format is '24', expected"),
        ({**compressed_tensors(), "ignore": ["re:("]}, r"'\(' is no regular expression"),
    ],
)
def test_other_formats_are_refused_by_name(
    quantization: object, message: str, tmp_path: Path
) -> None:
    values = {**CONFIGS["llama"].to_dict(), "architectures": ["LlamaForCausalLM"]}
    values["quantization_config"] = quantization
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=f"config.json: quantization_config.*{message}"):
        read_config(tmp_path)


def test_a_checkpoint_for_mlx_is_named(tmp_path: Path) -> None:
    values = {**CONFIGS["llama"].to_dict(), "architectures": ["LlamaForCausalLM"]}
    values["quantization_config"] = {"group_size": 64, "bits": 4, "mode": "affine"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=r"Apple's MLX.*--quantization int4.*GGUF"):
        read_config(tmp_path)


def test_merged_matrices_have_one_format(tmp_path: Path) -> None:
    save_fp8(CONFIGS["llama"], "compressed-tensors", tmp_path)
    file = tmp_path / "fp8" / "config.json"
    values = json.loads(file.read_text())
    values["quantization_config"]["ignore"].append(f"{LAYER}.self_attn.k_proj")
    file.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=r"gives .*q_proj, .*k_proj, .*v_proj different formats"):
        load(tmp_path / "fp8")


def test_targets_may_be_names(tmp_path: Path) -> None:
    """The first layer is named, the class of the others is not a target."""
    group = {"targets": [r"re:model\.layers\.0\.", "model.layers.1.self_attn.o_proj"]}
    values = {**CONFIGS["llama"].to_dict(), "architectures": ["LlamaForCausalLM"]}
    values["quantization_config"] = {**compressed_tensors(**group), "ignore": []}
    (tmp_path / "config.json").write_text(json.dumps(values))
    formats = read_config(tmp_path).formats

    def is_fp8(module: str) -> bool:
        return formats.of([module], "Linear") is not PLAIN

    assert is_fp8(f"{LAYER}.mlp.down_proj")
    assert is_fp8("model.layers.1.self_attn.o_proj")
    assert not is_fp8("model.layers.1.self_attn.o_proj_2")
    assert not is_fp8("model.layers.1.mlp.down_proj")


def test_an_ignored_layer_is_not_the_start_of_anothers_number() -> None:
    rule = excluded(Section({}, "config"), ["model.layers.1", "lm_head"])
    assert rule.matches("model.layers.1.mlp.down_proj", "Linear")
    assert not rule.matches("model.layers.10.mlp.down_proj", "Linear")
