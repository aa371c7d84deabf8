"""MiniMax-M2: a mixture with a sigmoid router in each layer; queries and keys are normed over all
heads, and half of a head rotates."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from minisgl.layers.moe import ExpertNames
from minisgl.models.blocks.mixture import expert_names, mixture_in_each_layer
from minisgl.models.config import ModelConfig
from minisgl.models.spec import Family, ModelSpec, layers_of
from minisgl_zoo.blocks.attention import WideNormBlock
from minisgl_zoo.blocks.routers import CORRECTION, SigmoidExperts


def spec(config: ModelConfig) -> ModelSpec:
    # Released files say how many dims rotate.
    rotary_dim = config.fields.integer("rotary_dim", config.rope.rotary_dim)
    if rotary_dim > config.head_dim or rotary_dim % 2:
        raise config.fields.error("rotary_dim", f"an even number up to {config.head_dim}")
    rope = replace(config.rope, rotary_dim=rotary_dim)
    return ModelSpec(
        config=config,
        layers=layers_of(config, rope=rope, block=WideNormBlock),
        moe=mixture_in_each_layer(config, _names, layer=partial(SigmoidExperts, config=config)),
    )


def _names(layer: int) -> ExpertNames:
    return expert_names(f"model.layers.{layer}.mlp", projections=("w1", "w3", "w2"))


MINIMAXM2 = Family(
    spec=spec,
    names={".block_sparse_moe.": ".mlp.", f".mlp.{CORRECTION}": f".mlp.gate.{CORRECTION}"},
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "rope_theta": 5e6,
        "max_position_embeddings": 196_608,
    },
)
