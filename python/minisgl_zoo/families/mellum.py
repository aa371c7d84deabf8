"""Mellum 2: Qwen3-MoE in which layers may have a window and a rotation of their own, and each layer
says whether it has a mixture."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from minisgl.models.families.layer_types import FULL, SLIDING
from minisgl.models.families.mixtures import qwen_mixture
from minisgl.models.spec import Family, ModelSpec
from minisgl_zoo.blocks.layer_types import layer_types, layers_of_types, sparse_layers
from minisgl_zoo.blocks.rotation import sliding_rope

if TYPE_CHECKING:
    from minisgl.models.config import ModelConfig
    from minisgl_zoo.view import CheckpointView


def spec(config: ModelConfig) -> ModelSpec:
    types = layer_types(config)
    windowed = sliding_rope(config, 10_000.0)
    ropes = [windowed if kind == SLIDING else config.rope for kind in types]
    bias = config.fields.flag("attention_bias", False)
    return ModelSpec(
        config=config,
        layers=layers_of_types(config, types, ropes=ropes),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        moe=replace(qwen_mixture(config), is_sparse=sparse_layers(config)),
    )


def _without_drafts(view: CheckpointView, config: ModelConfig) -> CheckpointView:
    """Leave out the layer of multi-token prediction, as each view does."""
    return view


FAMILY = Family(
    architectures=("MellumForCausalLM",),
    spec=spec,
    view=_without_drafts,
    defaults={
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "sliding_window": 1024,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 896,
        "norm_topk_prob": True,
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
            FULL: {"rope_type": "default", "rope_theta": 500_000.0},
        },
    },
    layer_ropes=True,
)
