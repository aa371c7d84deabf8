"""Mixtral, Qwen2-MoE and Qwen3-MoE: the models of `dense` with a mixture in place of the MLP."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from minisgl.models.blocks.mixture import (
    MoeSpec,
    expert_names,
    mixture_in_each_layer,
    names_in_mlp,
    read_experts,
)
from minisgl.models.families.dense import (
    QWEN_WINDOW,
    mistral,
    plain,
    qwen_layers,
    qwen_window,
)
from minisgl.models.spec import Family, LayerSpec, layers_of

if TYPE_CHECKING:
    from minisgl.layers.moe import ExpertNames
    from minisgl.models.config import ModelConfig


def _mixtral_names(layer: int) -> ExpertNames:
    """Return the first files' names, which have `block_sparse_moe`, with those of newer files,
    which have `mlp`, as their alternatives."""
    new = expert_names(f"model.layers.{layer}.mlp")
    old = expert_names(f"model.layers.{layer}.block_sparse_moe", projections=("w1", "w3", "w2"))
    return replace(old, router_alias=new.router, all_gate_up=new.all_gate_up, all_down=new.all_down)


def _qwen2_moe_layers(config: ModelConfig) -> tuple[LayerSpec, ...]:
    """Without the field `layer_types`, every other layer below `max_window_layers` has the window,
    as in Hugging Face."""
    if config.fields.values.get("layer_types") is not None:
        return qwen_layers(config)
    window = qwen_window(config)
    first = config.fields.integer("max_window_layers", minimum=0)
    windows = [window if i % 2 == 0 and i < first else None for i in range(config.num_layers)]
    return layers_of(config, windows)


def _qwen2_moe_mixture(config: ModelConfig) -> MoeSpec:
    """An expert that every token takes, beside the others."""
    size = config.fields.integer("shared_expert_intermediate_size")
    return qwen_mixture(config, shared_size=size)


def _qwen3_moe_layers(config: ModelConfig) -> tuple[LayerSpec, ...]:
    return layers_of(config, (qwen_window(config),) * config.num_layers)


def qwen_mixture(config: ModelConfig, shared_size: int = 0) -> MoeSpec:
    """Return the mixture that config.json describes. shared_size: see `MoeSpec`. Raises
    ConfigError."""
    fields = config.fields
    newer = "num_local_experts" in fields.values  # as transformers 5 writes it
    num_experts, top_k = read_experts(config, "num_local_experts" if newer else "num_experts")
    dense = fields.values.get("mlp_only_layers")
    dense = [] if dense is None else dense
    if type(dense) is not list or any(type(index) is not int for index in dense):
        raise fields.error("mlp_only_layers", "a list of layers' numbers")
    step = fields.integer("decoder_sparse_step", 1)
    return MoeSpec(
        num_experts=num_experts,
        top_k=top_k,
        inner_size=fields.integer("moe_intermediate_size"),
        renormalise=fields.flag("norm_topk_prob", False),
        is_sparse=tuple(i not in dense and (i + 1) % step == 0 for i in range(config.num_layers)),
        names=names_in_mlp,
        shared_size=shared_size,
    )


MIXTRAL = Family(
    spec=partial(mistral, moe=partial(mixture_in_each_layer, names=_mixtral_names)),
    defaults={
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
    },
)
QWEN2_MOE = Family(
    spec=partial(
        plain,
        layers=_qwen2_moe_layers,
        moe=_qwen2_moe_mixture,
        qkv_bias="qkv_bias",
        o_bias=False,
    ),
    defaults={
        "qkv_bias": True,
        **QWEN_WINDOW,
        "num_key_value_heads": 16,
        "intermediate_size": 5632,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts": 60,
        "num_experts_per_tok": 4,
    },
)
QWEN3_MOE = Family(
    spec=partial(plain, layers=_qwen3_moe_layers, moe=qwen_mixture, qk_norm=True),
    defaults={
        **QWEN_WINDOW,
        "num_key_value_heads": 4,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    },
)
