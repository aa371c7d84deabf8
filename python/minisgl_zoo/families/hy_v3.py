"""Hy3: GLM-4.5's mixture in all but the first layer, and Qwen3's attention."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from minisgl.models.spec import ModelSpec, layers_of
from minisgl_zoo.families import glm4_moe
from minisgl_zoo.families.minimax_m2 import CORRECTION

if TYPE_CHECKING:
    from minisgl.models.config import ModelConfig


def spec(config: ModelConfig) -> ModelSpec:
    bias = config.fields.flag("attention_bias", False)
    if config.fields.flag("mlp_bias", False):
        raise config.fields.error("mlp_bias", "false: biases of MLPs are not supported")
    return ModelSpec(
        config=config,
        layers=layers_of(config),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        moe=glm4_moe.sigmoid_mixture(config),
    )


FAMILY = replace(
    glm4_moe.FAMILY,
    architectures=("HYV3ForCausalLM",),
    spec=spec,
    renames={
        "num_experts": "n_routed_experts",
        "num_shared_experts": "n_shared_experts",
        "router_scaling_factor": "routed_scaling_factor",
    },
    names={
        ".mlp.router.gate.": ".mlp.gate.",
        ".mlp.expert_bias": f".mlp.gate.{CORRECTION}",
        f".mlp.{CORRECTION}": f".mlp.gate.{CORRECTION}",
        ".mlp.shared_mlp.": ".mlp.shared_experts.",
    },
    defaults={
        "n_routed_experts": 192,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "moe_intermediate_size": 1536,
        "routed_scaling_factor": 2.826,
        "rms_norm_eps": 1e-5,
        "rope_theta": 11_158_840.0,
        "max_position_embeddings": 131_072,
    },
)
