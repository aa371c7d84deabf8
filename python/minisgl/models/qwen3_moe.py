"""Qwen3-MoE: Qwen3 with a mixture in most layers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from minisgl.models import qwen3
from minisgl.models.qwen_mixture import qwen_mixture
from minisgl.models.spec import Family, ModelSpec, layers_of

if TYPE_CHECKING:
    from minisgl.models.config import ModelConfig


def spec(config: ModelConfig) -> ModelSpec:
    fields = config.fields
    window = None
    if fields.flag("use_sliding_window", False):
        window = fields.optional_integer("sliding_window")
    dense = qwen3.spec(config)
    layers = layers_of(config, (window,) * config.num_layers)
    return replace(dense, layers=layers, moe=qwen_mixture(config))


FAMILY = Family(
    architectures=("Qwen3MoeForCausalLM",),
    spec=spec,
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
