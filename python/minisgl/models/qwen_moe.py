"""Qwen2-MoE and Qwen3-MoE: the dense families of these names, with a mixture in most layers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from minisgl.layers.moe import ExpertNames
from minisgl.models import qwen2, qwen3
from minisgl.models.spec import Family, ModelSpec, MoeSpec

if TYPE_CHECKING:
    from minisgl.models.config import ModelConfig


def qwen2_spec(config: ModelConfig) -> ModelSpec:
    """As in Hugging Face, with its own rule for which layers attend within a window."""
    fields = config.fields
    window = None
    if fields.flag("use_sliding_window", False):
        window = fields.optional_integer("sliding_window")
    first = fields.integer("max_window_layers", minimum=0)
    windows = tuple(window if i % 2 == 0 and i < first else None for i in range(config.num_layers))
    if fields.values.get("layer_types") is not None:
        windows = qwen2.qwen_windows(config)
    return ModelSpec(
        config=config,
        windows=windows,
        qkv_bias=fields.flag("qkv_bias", True),
        moe=_mixture(config, shared_size=fields.integer("shared_expert_intermediate_size")),
    )


def qwen3_spec(config: ModelConfig) -> ModelSpec:
    fields = config.fields
    window = None
    if fields.flag("use_sliding_window", False):
        window = fields.optional_integer("sliding_window")
    dense = qwen3.spec(config)
    return replace(dense, windows=(window,) * config.num_layers, moe=_mixture(config))


def _mixture(config: ModelConfig, shared_size: int = 0) -> MoeSpec:
    fields = config.fields
    newer = "num_local_experts" in fields.values  # as transformers 5 writes it
    num_experts, top_k = config.experts("num_local_experts" if newer else "num_experts")
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
        names=_names,
        shared_size=shared_size,
    )


def _names(layer: int) -> ExpertNames:
    prefix = f"model.layers.{layer}.mlp"
    return ExpertNames(
        router=f"{prefix}.gate.weight",
        router_alias=None,
        gate=f"{prefix}.experts.{{}}.gate_proj.weight",
        up=f"{prefix}.experts.{{}}.up_proj.weight",
        down=f"{prefix}.experts.{{}}.down_proj.weight",
        all_gate_up=f"{prefix}.experts.gate_up_proj",
        all_down=f"{prefix}.experts.down_proj",
    )


QWEN2_MOE = Family(
    architectures=("Qwen2MoeForCausalLM",),
    spec=qwen2_spec,
    defaults={
        "num_key_value_heads": 16,
        "intermediate_size": 5632,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
)
QWEN3_MOE = Family(
    architectures=("Qwen3MoeForCausalLM",),
    spec=qwen3_spec,
    defaults={
        "num_key_value_heads": 4,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
)
