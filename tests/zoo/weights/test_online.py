"""`--quantization`: a plain checkpoint that is quantised while it is read.

Planted once, and noticed: the scale of the block before, int4's offset of 8 left out, int8 cut off
instead of rounded.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    CohereConfig,
    DeepseekV3Config,
    Lfm2Config,
    Lfm3Config,
    LlamaConfig,
    NemotronHConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

from helpers.family_cases import MOE
from helpers.model_harness import load, make_reference, relative_error
from helpers.quantised import HALF_BLOCKS, TOLERANCE, is_linear, run, run_ranks, transformers_ids
from minisgl.core.args import Quantization as Kind
from minisgl.engine import EngineConfig
from minisgl.errors import ConfigError
from minisgl.kernel.registry import create_ops
from minisgl.llm import LLM, SamplingParams
from minisgl.models.loading.reading import read_config
from minisgl.utils.text import size_of
from minisgl_gateway.dry_run import dry_run
from minisgl_zoo.weights import online_formats
from minisgl_zoo.weights.online import Loss, _scales
from minisgl_zoo.weights.online_formats import OnlineFormats
from minisgl_zoo.weights.online_int4 import fit_groups, quantise

HEADLESS = {name: size for name, size in HALF_BLOCKS.items() if name != "head_dim"}
MAMBA = {"layers_block_type": ["linear_attention", "mlp", "full_attention"], "chunk_size": 8}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**HALF_BLOCKS, attention_bias=True),
    "qwen3-moe": Qwen3MoeConfig(**{**HALF_BLOCKS, **MOE, "moe_intermediate_size": 192}),
    # A block is a head, whose rows are read in another order.
    "cohere": CohereConfig(**{**HEADLESS, "hidden_size": 512}),
    # Blocks begin where a part of `in_proj` begins, here with a block of the whole.
    "lfm2": Lfm2Config(
        **{**HALF_BLOCKS, "hidden_size": 256}, layer_types=["conv", "full_attention"]
    ),
    # Gates are a part of four rows, beside queries, keys and values.
    "lfm3": Lfm3Config(
        **{**HALF_BLOCKS, "hidden_size": 256},
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=9,
    ),
    # The product of latents stays plain.
    "deepseek-v3": DeepseekV3Config(
        **HALF_BLOCKS,
        n_routed_experts=5,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=192,
        first_k_dense_replace=1,
        q_lora_rank=128,
        kv_lora_rank=96,
        qk_nope_head_dim=48,
        qk_rope_head_dim=16,
        v_head_dim=32,
    ),
    "nemotron-h": NemotronHConfig(
        **{**HALF_BLOCKS, **MAMBA},
        mamba_num_heads=4,
        mamba_head_dim=64,
        ssm_state_size=64,
        n_groups=2,
    ),
    "nemotron-3": NemotronHConfig(
        **HALF_BLOCKS,
        layers_block_type=["full_attention", "moe"],
        n_routed_experts=5,
        moe_intermediate_size=192,
        moe_shared_expert_intermediate_size=128,
        moe_latent_size=128,
    ),
}
KINDS: tuple[Kind, ...] = ("fp8", "int8", "int4")
ROWS = ("llama", "qwen3-moe", "lfm3")
"""Each row of int8 has a scale, wherever a part begins: plain layers, experts and gates."""


def dequantised(kind: str, weight: Tensor, name: str = "") -> Tensor:
    """The published recipe, one block after another. With int4, attention is int8."""
    if kind == "int4":
        if not is_sensitive(name):
            groups = torch.nn.functional.pad(weight, (0, -weight.shape[1] % 32))
            numbers, scale, zero = fit_groups(groups.unflatten(1, (-1, 32)))
            return ((numbers - zero) * scale).flatten(1)[:, : weight.shape[1]]
        kind = "int8"
    height, width = weight.shape
    rows, columns = {"fp8": (128, 128), "int8": (1, width)}[kind]
    made = torch.empty_like(weight)
    for top in range(0, height, rows):
        for left in range(0, width, columns):
            block = weight[top : top + rows, left : left + columns]
            most = block.abs().max()
            if kind == "fp8":
                scale = most / 448
                values = (block / scale).to(torch.float8_e4m3fn).float() * scale
            else:
                values = (block / (most / 127)).round() * (most / 127)
            made[top : top + rows, left : left + columns] = values
    return made


def is_sensitive(name: str) -> bool:
    return ".self_attn." in name or (".mixer." in name and name.split(".")[-2][1:] == "_proj")


def save(config: PreTrainedConfig, kind: str, folder: Path, num_ranks: int = 1) -> None:
    """Save a random model to `folder`/plain, and as it is after quantising to /float32. Each rank
    has a scale for its part of a row of int8."""
    model = make_reference(config)
    for name in ("plain", "float32"):
        model.save_pretrained(folder / name, save_original_format=True)
    file = folder / "float32" / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if is_linear(name, tensor) and "kv_b_proj" not in name:
            shares = tensor.chunk(num_ranks if kind == "int4" and ".o_proj." in name else 1, dim=1)
            tensors[name] = torch.cat([dequantised(kind, each, name) for each in shares], dim=1)
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) for name in CONFIGS for kind in KINDS if kind != "int8" or name in ROWS],
)
def test_logits_are_those_of_dequantised_weights(name: str, kind: Kind, tmp_path: Path) -> None:
    save(CONFIGS[name], kind, tmp_path)
    expected, tokens = run(tmp_path / "float32")
    logits, ours = run(tmp_path / "plain", quantization=kind)
    assert relative_error(logits, expected) <= TOLERANCE
    assert ours == tokens
    if name == "llama":
        assert ours == transformers_ids(tmp_path / "float32")


@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_two_ranks_that_share_whole_blocks_quantise_as_one(kind: Kind, tmp_path: Path) -> None:
    save(LlamaConfig(**{**HALF_BLOCKS, "intermediate_size": 256}), kind, tmp_path, num_ranks=2)
    expected, tokens = run(tmp_path / "float32")
    for logits, ours in run_ranks(tmp_path / "plain", quantization=kind):
        assert relative_error(logits, expected) <= TOLERANCE
        assert ours == tokens


@pytest.mark.parametrize(("kind", "ratio"), [("fp8", 0.27), ("int8", 0.27), ("int4", 0.23)])
def test_it_saves_memory_and_says_what_it_lost(
    kind: Kind, ratio: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Against float32. The vocabulary is not quantised, and small here."""
    make_reference(CONFIGS["llama"]).save_pretrained(tmp_path)
    plain = load(tmp_path).num_weight_bytes
    with caplog.at_level("INFO", logger="minisgl"):
        model = load(tmp_path, quantization=kind)
    vocabulary = 2 * 211 * 192 * 4
    assert model.num_weight_bytes - vocabulary <= ratio * (plain - vocabulary)
    lines = [line for line in caplog.messages if line.startswith("quantised model.")]
    assert len(lines) == 2 * 4
    assert "model.layers.0.self_attn.q_proj and 2 more in" in lines[0]
    errors = [float(line.split("error ")[1].split()[0]) for line in lines]
    low, high = {"fp8": (0.02, 0.03), "int8": (0.004, 0.01), "int4": (0.06, 0.08)}[kind]
    for line, error in zip(lines, errors, strict=True):
        is_int8 = kind == "int4" and "self_attn" in line
        assert (0.004 < error < 0.01) if is_int8 else (low < error < high), line
    (summary,) = (line for line in caplog.messages if line.startswith("quantised 8 weights in "))
    assert f"the largest {max(errors):.4f} (model.layers." in summary


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("vocab_size", [208, 211], ids=["panels", "no whole panels"])
def test_the_head_is_int8_where_the_cpu_multiplies_it(
    is_tied: bool, vocab_size: int, tmp_path: Path
) -> None:
    """And a tied embedding with it; beside the numbers that the recipe makes."""
    sizes = {**HALF_BLOCKS, "vocab_size": vocab_size, "tie_word_embeddings": is_tied}
    reference = make_reference(LlamaConfig(**sizes)).bfloat16()
    reference.save_pretrained(tmp_path)
    ops = create_ops(torch.device("cpu"))
    if ops.name != "cpu":
        pytest.skip("no compiled kernels")
    model = load(tmp_path, quantization="int4", dtype=torch.bfloat16, ops=ops)
    is_int8 = vocab_size % 16 == 0
    tables = {
        "embed": (reference.get_input_embeddings().weight.detach(), is_int8 and is_tied),
        "head": (reference.get_output_embeddings().weight.detach(), is_int8),
    }
    kept = {
        name: dequantised("int8", table.float()) if is_quantised else table.float()
        for name, (table, is_quantised) in tables.items()
    }
    ids = torch.arange(vocab_size, dtype=torch.int32)
    assert torch.equal(model.embed(ids), kept["embed"].bfloat16())
    x = torch.randn(
        3, HALF_BLOCKS["hidden_size"], generator=torch.Generator().manual_seed(0)
    ).bfloat16()
    assert relative_error(model.lm_head.forward(x).float(), x.float() @ kept["head"].T) < 2**-7
    config = EngineConfig(
        model=str(tmp_path), device="cpu", dtype="bfloat16", quantization="int4", num_pages=8
    )
    assert size_of(model.num_weight_bytes) in dry_run(config)


@pytest.mark.parametrize("kind", KINDS)
def test_a_unit_of_zeros_has_the_scale_1(kind: Kind) -> None:
    values = torch.zeros(3, 130)
    if kind == "int4":
        numbers, scales, zeros = quantise(values, 32, Loss("zeros"))
        assert not numbers.any()
        assert not zeros.any()
    else:
        scales = _scales(values, kind)
    assert scales.unique().tolist() == [1.0]


def test_the_last_of_an_odd_number_of_inputs_is_in_the_low_bits() -> None:
    packed, scale, zero = quantise(torch.tensor([[10.0, -5.0, 3.0]]), 32, Loss("a matrix"))
    assert (packed.tolist(), scale.tolist(), zero.tolist()) == ([[15, 8]], [[1.0]], [[5]])
    assert packed[0, 0] == 15 | 0 << 4


def test_sensitive_layers_are_int8() -> None:
    formats = OnlineFormats.of_kind("int4", 16)

    def is_int8(name: str) -> bool:
        return "int8" in formats.of([name], "Linear").name

    downs = [i for i in range(16) if is_int8(f"model.layers.{i}.mlp.down_proj")]
    assert downs == [0, 1, 4, 7, 10, 13, 14, 15]
    assert is_int8("model.layers.9.self_attn.o_proj")
    assert is_int8("model.layers.9.mixer.q_proj")
    for name in ("mlp.gate_proj", "mlp.experts.0.down_proj", "mixer.in_proj"):
        assert not is_int8(f"model.layers.0.{name}")
    fp8 = OnlineFormats.of_kind("fp8", 18)
    assert fp8.of(["model.layers.0.self_attn.o_proj"], "Linear") == fp8.format


def test_zero_points_and_fitted_scales_have_less_error() -> None:
    """Than the scales of a group's largest value, of its range, and of fewer groups."""
    values = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))

    def error(made: Tensor) -> float:
        return float((values - made).square().mean().sqrt())

    groups = values.unflatten(1, (-1, 32))
    low = groups.amin(-1, keepdim=True)
    step = (groups.amax(-1, keepdim=True) - low) / 15
    middle = (-low / step).round()
    of_range = ((groups / step + middle).round().clamp(0, 15) - middle) * step
    largest = values.unflatten(1, (-1, 128)).abs().amax(-1, keepdim=True) / 7
    before = (values.unflatten(1, (-1, 128)) / largest).round() * largest
    numbers, scale, zero = fit_groups(groups)
    assert numbers.unique().tolist() == list(range(16))
    assert torch.equal(scale, scale.bfloat16().float())
    fitted = error(((numbers - zero) * scale).flatten(1))
    assert fitted < 0.97 * error(of_range.flatten(1))
    assert fitted < 0.7 * error(before.flatten(1))


@pytest.mark.parametrize("flags", [{"avx2"}, {"avx2", "avx512bw"}, set()])
def test_where_int4_is_slower_the_log_says_so(
    flags: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    make_reference(CONFIGS["llama"]).bfloat16().save_pretrained(tmp_path)
    ops = create_ops(torch.device("cpu"))
    if ops.name != "cpu":
        pytest.skip("no compiled kernels")
    monkeypatch.setattr(online_formats, "cpu_flags", lambda: frozenset(flags))
    with caplog.at_level("INFO", logger="minisgl"):
        load(tmp_path, quantization="int4", dtype=torch.bfloat16, ops=ops)
    assert ("int4 computes slower than int8" in caplog.text) == (flags == {"avx2"})


def test_dry_run_says_what_it_saves(tmp_path: Path) -> None:
    make_reference(CONFIGS["llama"]).save_pretrained(tmp_path)
    config = EngineConfig(model=str(tmp_path), device="cpu", quantization="int4", num_pages=8)
    assert "--quantization int4: weights take " in dry_run(config)
    assert "--quantization" not in dry_run(EngineConfig(model=str(tmp_path), device="cpu"))


def test_a_quantised_checkpoint_is_refused(tmp_path: Path) -> None:
    values = {**CONFIGS["llama"].to_dict(), "architectures": ["LlamaForCausalLM"]}
    values["quantization_config"] = {"quant_method": "fp8"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=r"int8 is for plain checkpoints.*is quantised already"):
        read_config(tmp_path, "int8")


def test_llm_has_the_option() -> None:
    prompt, params = "What is two plus two?", SamplingParams(max_tokens=8, temperature=0)
    with LLM(attn="torch", progress=False, quantization="int8") as llm:
        answer = llm.generate(prompt, params)[0].text
    with LLM(attn="torch", progress=False) as llm:
        assert llm.generate(prompt, params)[0].text == answer
    with pytest.raises(ConfigError, match="quantization must be one of fp8, int8, int4, got 'q4'"):
        LLM(quantization="q4")
