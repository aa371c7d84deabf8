"""Ling 2.0 and Ring 2.0: GLM-4.5's attention, with norms on heads, and its mixture in all but the
first layers; q, k and v are one tensor."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from minisgl.models.spec import ModelSpec, layers_of
from minisgl_zoo.families import glm4_moe
from minisgl_zoo.families.minimax_m2 import CORRECTION

if TYPE_CHECKING:
    from minisgl.models.config import ModelConfig
    from minisgl_zoo.view import CheckpointView


def spec(config: ModelConfig) -> ModelSpec:
    fields = config.fields
    return ModelSpec(
        config=config,
        layers=layers_of(config),
        qkv_bias=fields.flag("use_qkv_bias", False),
        o_bias=fields.flag("use_bias", False),
        qk_norm=fields.flag("use_qk_norm", True),
        moe=glm4_moe.sigmoid_mixture(config),
    )


def _view(view: CheckpointView, config: ModelConfig) -> CheckpointView:
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    parts = ("q_proj", "k_proj", "v_proj")
    view = glm4_moe.without_drafts(view, config)
    return view.split("query_key_value", parts, (q_rows, kv_rows, kv_rows))


FAMILY = replace(
    glm4_moe.FAMILY,
    architectures=("BailingMoeV2ForCausalLM",),
    spec=spec,
    view=_view,
    renames={"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"},
    names={
        ".word_embeddings.": ".embed_tokens.",
        ".attention.dense.": ".self_attn.o_proj.",
        ".attention.query_layernorm.": ".self_attn.q_norm.",
        ".attention.key_layernorm.": ".self_attn.k_norm.",
        ".attention.": ".self_attn.",
        ".mlp.gate.expert_bias": f".mlp.gate.{CORRECTION}",
    },
    defaults={
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "moe_intermediate_size": 512,
        "n_group": 8,
        "topk_group": 4,
        "num_nextn_predict_layers": 0,
        "rope_theta": 600_000.0,
        "max_position_embeddings": 32_768,
    },
)
