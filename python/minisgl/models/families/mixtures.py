"""Mixtral: a Mistral whose layers all have a mixture in place of the MLP."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from minisgl.models.blocks.mixture import expert_names, mixture_in_each_layer
from minisgl.models.spec import Family, ModelSpec, layers_of

if TYPE_CHECKING:
    from minisgl.layers.moe import ExpertNames
    from minisgl.models.config import ModelConfig


def spec(config: ModelConfig) -> ModelSpec:
    window = config.fields.optional_integer("sliding_window")
    return ModelSpec(
        config=config,
        layers=layers_of(config, (window,) * config.num_layers),
        moe=mixture_in_each_layer(config, _names),
    )


def _names(layer: int) -> ExpertNames:
    """Return the first files' names, which have `block_sparse_moe`, with those of newer files,
    which have `mlp`, as their alternatives."""
    new = expert_names(f"model.layers.{layer}.mlp")
    old = expert_names(f"model.layers.{layer}.block_sparse_moe", projections=("w1", "w3", "w2"))
    return replace(old, router_alias=new.router, all_gate_up=new.all_gate_up, all_down=new.all_down)


FAMILY = Family(
    architectures=("MixtralForCausalLM",),
    spec=spec,
    defaults={
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
    },
)
