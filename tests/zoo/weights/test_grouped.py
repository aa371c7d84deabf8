"""int4 and int8 with groups: compressed-tensors' pack-quantized, AWQ (gemm) and GPTQ.

The packers are written out here, one number at a time, from the published layouts. Planted once,
and noticed: nibbles swapped, AWQ's order of columns inverted, version 1's zero point without its
offset, groups one late, act-order ignored.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    FalconH1Config,
    GlmConfig,
    LlamaConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2MoeConfig,
)

from helpers.family_cases import MOE, SIZES
from helpers.model_harness import load, relative_error
from helpers.packed_groups import AUTO_ROUND, AWQ, GPTQ, GROUP, compressed, grouped, pack
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
from minisgl.quantization import PLAIN
from minisgl_zoo.weights.grouped import Grouped, GroupedWeight, _packed_rows, _zeros

NOTICED = 0.02
LARGE: dict[str, Any] = {
    **SIZES,
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 32,
    "num_attention_heads": 2,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**LARGE, attention_bias=True),
    "qwen2-moe": Qwen2MoeConfig(
        **{**LARGE, **MOE, "moe_intermediate_size": 64}, shared_expert_intermediate_size=96
    ),
}
CASES: dict[str, tuple[dict[str, Any], Quantise]] = {
    "compressed-tensors": (
        compressed(symmetric=True),
        grouped("compressed-tensors", zero=False),
    ),
    "compressed-tensors-zero": (compressed(symmetric=False), grouped("compressed-tensors")),
    "compressed-tensors-act-order": (
        compressed(symmetric=False, actorder="group"),
        grouped("compressed-tensors", act_order=True),
    ),
    "compressed-tensors-row": (
        compressed(symmetric=True, strategy="channel", group_size=None),
        grouped("compressed-tensors", group=0, zero=False),
    ),
    "compressed-tensors-8": (
        compressed(symmetric=False, num_bits=8),
        grouped("compressed-tensors", 8),
    ),
    "awq": (AWQ, grouped("awq")),
    "awq-capitals": ({**AWQ, "version": "GEMM"}, grouped("awq")),
    "gptq": (GPTQ, grouped("gptq")),
    "gptq-act-order": ({**GPTQ, "desc_act": True}, grouped("gptq", act_order=True)),
    "gptq-v2": ({**GPTQ, "checkpoint_format": "gptq_v2"}, grouped("gptq_v2")),
    "auto-round": (AUTO_ROUND, grouped("gptq")),
    "auto-round-v2": ({**AUTO_ROUND, "packing_format": "auto_round:gptqmodel"}, grouped("gptq_v2")),
    "auto-round-awq": ({**AUTO_ROUND, "packing_format": "auto_round:auto_awq"}, grouped("awq")),
    "gptq-8-row": ({**GPTQ, "bits": 8, "group_size": -1}, grouped("gptq", 8, group=0)),
}
LAYOUTS = [name for name in CASES if "auto-round" not in name]
"""AutoRound has those of the others."""


@pytest.mark.parametrize("case", LAYOUTS)
def test_fused_layers_are_split_in_every_format(case: str, tmp_path: Path) -> None:
    """q, k and v, gate and up. Planted once, and noticed: k at the place of q."""
    sizes = {name: size for name, size in LARGE.items() if name != "head_dim"}
    save_both(Phi3Config(**sizes), *CASES[case], tmp_path)
    expected, tokens = run(tmp_path / "float32")
    assert tokens == transformers_ids(tmp_path / "float32")  # which is split, too
    for logits, ours in [run(tmp_path / "quantised"), *run_ranks(tmp_path / "quantised")]:
        assert relative_error(logits, expected) <= TOLERANCE
        assert ours == tokens


@pytest.mark.parametrize("case", LAYOUTS)
def test_heads_that_rotate_interleaved_pairs_are_reordered(case: str, tmp_path: Path) -> None:
    """Planted once, and noticed where there are words of outputs: AWQ's in order."""
    save_both(GlmConfig(**LARGE), *CASES[case], tmp_path)
    expected, tokens = run(tmp_path / "float32")
    assert tokens == transformers_ids(tmp_path / "float32")
    for logits, ours in [run(tmp_path / "quantised"), *run_ranks(tmp_path / "quantised")]:
        assert relative_error(logits, expected) <= TOLERANCE
        assert ours == tokens


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_dequantised_weights(case: str, tmp_path: Path) -> None:
    save_both(CONFIGS["llama"], *CASES[case], tmp_path)
    expected, tokens = run(tmp_path / "float32")
    logits, ours = run(tmp_path / "quantised")
    assert relative_error(logits, expected) <= TOLERANCE
    assert ours == tokens == transformers_ids(tmp_path / "float32")


@pytest.mark.parametrize(
    ("name", "case", "expert_parallel"),
    [
        ("llama", "compressed-tensors-zero", False),
        ("llama", "compressed-tensors-act-order", False),
        ("llama", "awq", False),
        ("llama", "gptq-act-order", False),
        ("qwen2-moe", "awq", False),
        ("qwen2-moe", "gptq-act-order", True),
        ("qwen2-moe", "compressed-tensors", True),
    ],
)
def test_two_ranks_share_whole_groups(
    name: str, case: str, expert_parallel: bool, tmp_path: Path
) -> None:
    save_both(CONFIGS[name], *CASES[case], tmp_path)
    expected, tokens = run(tmp_path / "float32")
    assert relative_error(run(tmp_path / "quantised")[0], expected) <= TOLERANCE
    for logits, ours in run_ranks(tmp_path / "quantised", expert_parallel=expert_parallel):
        assert relative_error(logits, expected) <= TOLERANCE
        assert ours == tokens


def test_a_share_that_cuts_a_group_is_refused(tmp_path: Path) -> None:
    config = LlamaConfig(**{**LARGE, "head_dim": 16, "num_attention_heads": 4})
    save_both(config, *CASES["awq"], tmp_path)
    run(tmp_path / "quantised")
    config = LlamaConfig(**{**LARGE, "head_dim": 16})
    save_both(config, *CASES["awq"], tmp_path / "cut")
    with pytest.raises(ConfigError, match=r"o_proj: .* columns \d+ to \d+ of 32, .* units of 32"):
        run_ranks(tmp_path / "cut" / "quantised")


def test_auto_round_names_layers_with_other_bits(tmp_path: Path) -> None:
    """By name and by regular expression; layers outside of its blocks are plain."""

    def quantised(module: str, tensor: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        if module == "model.layers.0.mlp.down_proj":
            return {"weight": tensor}, tensor
        if module == "model.layers.1.self_attn.o_proj":
            return grouped("gptq", 8, group=16)(module, tensor)
        return grouped("gptq")(module, tensor)

    others = {
        "model.layers.0.mlp.down_proj": {"bits": 16, "data_type": "float"},
        r".*layers\.1\.self_attn\.o_proj.*": {"bits": 8, "group_size": 16},
    }
    save_both(CONFIGS["llama"], {**AUTO_ROUND, "extra_config": others}, quantised, tmp_path)
    expected, tokens = run(tmp_path / "float32")
    logits, ours = run(tmp_path / "quantised")
    assert relative_error(logits, expected) <= TOLERANCE
    assert ours == tokens
    blocks = {**AUTO_ROUND, "block_name_to_quantize": ["model.layers.1", "model.layers.2"]}
    formats = read_formats(blocks, "config.json")
    assert formats.of(["model.layers.0.mlp.down_proj"], "Linear") is PLAIN
    assert formats.of(["model.layers.1.mlp.down_proj"], "Linear").unit == GROUP
    assert formats.of(["model.layers.10.mlp.down_proj"], "Linear") is PLAIN


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("packing_format", "auto_round:fp8_static"),
        ("bits", 2),
        ("data_type", "mx_fp"),
        ("act_bits", 8),
        ("extra_config", {"model.layers.0.mlp.up_proj": {"bits": 3}}),
        ("extra_config", {"model.layers.0.mlp.up_proj": {"bits": "four"}}),
    ],
)
def test_what_auto_round_packs_otherwise_is_refused(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=r"(packing_format|bits|data_type) is .*, expected "):
        read_formats({**AUTO_ROUND, key: value}, "config.json")


def test_the_numbers_stay_in_4_bits(tmp_path: Path) -> None:
    save_both(CONFIGS["llama"], *CASES["gptq"], tmp_path)
    matrices = [n for n in load(tmp_path / "quantised").walk() if isinstance(n, GroupedWeight)]
    assert len(matrices) == 2 * 4
    for weight in matrices:
        numbers = weight.dense().numel()
        assert weight.packed.nbytes == numbers // 2
        held = sum(parameter.num_bytes for parameter in weight.parameters())
        assert held == numbers // 2 + numbers // GROUP * 5  # a scale and a zero point


MISTAKES = {
    "nibbles": ("qweight", lambda x: (x >> 4 & 0x0F0F0F0F) | (x & 0x0F0F0F0F) << 4),
    "zero points": ("qzeros", lambda x: x ^ 0x11111111),
    "groups": ("scales", lambda x: x.roll(1, 0)),
    "act-order": ("g_idx", lambda x: x.sort().values),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_would_be_noticed(mistake: str, tmp_path: Path) -> None:
    tensors = save_both(CONFIGS["llama"], *CASES["gptq-act-order"], tmp_path)
    expected, _ = run(tmp_path / "float32")
    kind, change = MISTAKES[mistake]
    name = f"model.layers.0.mlp.down_proj.{kind}"
    tensors[name] = change(tensors[name])
    save_quantised(tensors, tmp_path)
    assert relative_error(run(tmp_path / "quantised")[0], expected) >= NOTICED / 2


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({**AWQ, "version": "gemv"}, "version is 'gemv', expected None or 'gemm'"),
        ({**AWQ, "version": "GEMV"}, "version is 'GEMV', expected None or 'gemm'"),
        ({**AWQ, "zero_point": False}, "zero_point is False, expected True"),
        ({**AWQ, "group_size": 0}, "group_size is 0, expected a positive integer"),
        ({**GPTQ, "bits": 3}, "bits is 3, expected 4 or 8"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin', expected"),
        ({**GPTQ, "dynamic": {"+:.*up": {"bits": 8}}}, "only names that start with -:"),
        ({**GPTQ, "modules_in_block_to_quantize": 1}, "is 1, expected lists of names"),
        (compressed(strategy="tensor"), "strategy is 'tensor', expected 'channel' or 'group'"),
        (compressed(actorder="x"), "actorder is 'x', expected"),
        (compressed(num_bits=3), "num_bits is 3, expected 4 or 8"),
    ],
)
def test_other_formats_are_refused_by_name(
    quantization: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"config.json: quantization_config.*{message}"):
        read_formats(quantization, "config.json")


def test_zero_points_are_unpacked() -> None:
    """Version 1 of GPTQ stores zero - 1, so a zero point of 0 as the largest number. The last word
    of compressed-tensors may be partly filled."""
    stored = torch.tensor([[15, 0, 7, 14, 1, 2, 3, 4]])
    packed = pack(stored, 4)
    assert _zeros(packed, 4, "gptq")[:, 0].tolist() == [0, 1, 8, 15, 2, 3, 4, 5]
    assert _zeros(packed, 4, "gptq_v2")[:, 0].tolist() == stored[0].tolist()
    zeros = torch.arange(10).view(5, 2)
    assert _packed_rows(pack(zeros.T, 4).T, 4, 5).tolist() == zeros.tolist()


@pytest.mark.parametrize(
    ("actorder", "is_kept"), [("group", True), ("dynamic", True), ("weight", False), (None, False)]
)
def test_groups_are_out_of_order_by_actorder(actorder: str | None, is_kept: bool) -> None:
    formats = read_formats(compressed(actorder=actorder), "config.json")
    weight = formats.of(["model.layers.0.mlp.down_proj"], "Linear").weight
    assert isinstance(weight, Grouped)
    assert weight.act_order == is_kept


def test_gptq_s_lists_choose_modules() -> None:
    formats = read_formats(
        {
            **GPTQ,
            "dynamic": {r"-:model\.layers\.1\.": {}},
            "modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.up_proj", "mlp.gate"]],
        },
        "config.json",
    )
    modules = ["0.self_attn.q_proj", "0.self_attn.o_proj", "0.mlp.gate", "1.self_attn.q_proj"]
    found = [formats.of([f"model.layers.{name}"], "Linear").name for name in modules]
    assert found == ["int4, a scale for each group of 32", "", "", ""]


FALCON = FalconH1Config(
    **{**LARGE, "num_hidden_layers": 2, "mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_n_groups": 2},
    mamba_d_state=16, mamba_chunk_size=8, embedding_multiplier=5.6, lm_head_multiplier=0.6,
    mlp_multipliers=[0.9, 0.6], key_multiplier=1.3, attention_in_multiplier=0.8,
    attention_out_multiplier=0.9, ssm_multipliers=[0.7, 0.8, 0.5, 1.2, 0.9],
    ssm_in_multiplier=1.2, ssm_out_multiplier=0.7,
)  # fmt: skip


@pytest.mark.parametrize("name", ["compressed-tensors-zero", "compressed-tensors-8", "awq", "gptq"])
def test_constants_multiply_the_scales(name: str, tmp_path: Path) -> None:
    """Of Falcon-H1, whose plain tensors are multiplied while they are read."""
    quantization, quantise = CASES[name]
    save_both(FALCON, quantization, quantise, tmp_path)
    logits, tokens = run(tmp_path / "quantised")
    expected, theirs = run(tmp_path / "float32")
    assert relative_error(logits, expected) <= TOLERANCE
    assert tokens == theirs
