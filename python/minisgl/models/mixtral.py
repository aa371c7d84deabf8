"""Mixtral: a Mistral whose layers all have a mixture in place of the MLP."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minisgl.layers.moe import ExpertNames
from minisgl.models.mixture import mixture_in_each_layer
from minisgl.models.spec import Family, ModelSpec, layers_of

if TYPE_CHECKING:
    from minisgl.models.config import ModelConfig


def spec(config: ModelConfig) -> ModelSpec:
    window = config.fields.optional_integer("sliding_window")
    return ModelSpec(
        config=config,
        layers=layers_of(config, (window,) * config.num_layers),
        moe=mixture_in_each_layer(config, _names),
    )


def _names(layer: int) -> ExpertNames:
    """Newer files say `mlp` where the first ones said `block_sparse_moe`."""
    old, new = f"model.layers.{layer}.block_sparse_moe", f"model.layers.{layer}.mlp"
    return ExpertNames(
        router=f"{old}.gate.weight",
        router_alias=f"{new}.gate.weight",
        gate=f"{old}.experts.{{}}.w1.weight",
        up=f"{old}.experts.{{}}.w3.weight",
        down=f"{old}.experts.{{}}.w2.weight",
        all_gate_up=f"{new}.experts.gate_up_proj",
        all_down=f"{new}.experts.down_proj",
    )


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
