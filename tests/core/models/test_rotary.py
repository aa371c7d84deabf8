"""Rope types against transformers' `ROPE_INIT_FUNCTIONS` and its rotary module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi.modeling_phi import apply_rotary_pos_emb

from minisgl.distributed import SingleRank
from minisgl.kernel.ops import Ops
from minisgl.layers import BuildContext, RotaryConfig, get_rope
from minisgl.models.loading.reading import read_config

BUILD = BuildContext(ops=Ops(), comm=SingleRank(), dtype=torch.float32)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
TYPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": YARN,
    "yarn-attention-factor": {**YARN, "attention_factor": 1.7},
    "yarn-mscale": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.0},
    "yarn-betas": {**YARN, "beta_fast": 20.0, "beta_slow": 3.0, "truncate": False},
    "yarn-all-stretched": {**YARN, "original_max_position_embeddings": 128},  # low is below dim 0
    "yarn-no-original": {"rope_type": "yarn", "factor": 4.0},
}


def configs(
    tmp_path: Any, rope: dict[str, Any], **changes: Any
) -> tuple[LlamaConfig, RotaryConfig]:
    """The same settings for them and for us, who read the file that they write."""
    theirs = LlamaConfig(
        hidden_size=96,
        num_attention_heads=2,
        max_position_embeddings=2048,
        rope_parameters={"rope_theta": 50_000.0, **rope},
        architectures=["LlamaForCausalLM"],
        **changes,
    )
    theirs.save_pretrained(tmp_path)
    return theirs, read_config(tmp_path).rope


@pytest.mark.parametrize("name", TYPES)
def test_tables_are_those_of_transformers(name: str, tmp_path: Any) -> None:
    theirs, ours = configs(tmp_path, TYPES[name])
    rope = get_rope(BUILD, ours, 2048)
    rope.init_buffers(torch.device("cpu"))
    cos, sin = LlamaRotaryEmbedding(theirs)(torch.zeros(1), torch.arange(2048)[None])
    expected = torch.cat((cos[0, :, :24], sin[0, :, :24]), dim=-1)
    torch.testing.assert_close(rope.cos_sin, expected, atol=2e-6, rtol=0)
    assert rope.num_buffer_bytes == 2048 * 48 * 4


def test_original_length_outside_of_the_rope_settings_wins(tmp_path: Any) -> None:
    theirs, ours = configs(tmp_path, YARN, original_max_position_embeddings=300)
    assert ours.original_max_position == 300
    expected, _ = ROPE_INIT_FUNCTIONS["yarn"](theirs)
    torch.testing.assert_close(ours.frequencies(2048)[0], expected, rtol=1e-6, atol=0)


def test_partial_rotary_factor_rotates_the_first_dims(tmp_path: Any) -> None:
    theirs, ours = configs(tmp_path, {**TYPES["linear"], "partial_rotary_factor": 0.5})
    assert ours.rotary_dim == 24
    expected, _ = ROPE_INIT_FUNCTIONS["linear"](theirs)
    torch.testing.assert_close(ours.frequencies(2048)[0], expected, rtol=1e-6, atol=0)

    rope = get_rope(BUILD, ours, 64)
    rope.init_buffers(torch.device("cpu"))
    q, k = torch.randn(9, 2, 48), torch.randn(9, 1, 48)
    positions = torch.arange(5, 14)
    angles = torch.cat((positions[:, None] * expected,) * 2, dim=-1)
    rotated = apply_rotary_pos_emb(q[..., :24], k[..., :24], angles.cos(), angles.sin())
    for got, whole, front in zip(rope.forward(q, k, positions), (q, k), rotated, strict=True):
        torch.testing.assert_close(got, torch.cat((front, whole[..., 24:]), dim=-1))


@pytest.mark.parametrize(
    ("name", "expected"),
    [("default", 2048), ("linear", 5120), ("dynamic", 2048), ("llama3", 2048), ("yarn", 2048)],
)
def test_max_context(name: str, expected: int, tmp_path: Any) -> None:
    assert configs(tmp_path, TYPES[name])[1].max_context == expected


def test_yarn_stretches_what_the_config_did_not(tmp_path: Any) -> None:
    assert configs(tmp_path, TYPES["yarn-no-original"])[1].max_context == 4 * 2048
