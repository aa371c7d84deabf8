"""Qwen3-MoE: Qwen3 with a mixture in most layers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from minisgl.models.families import qwen3
from minisgl.models.families.qwen2 import qwen_window
from minisgl.models.families.qwen_mixture import qwen_mixture
from minisgl.models.spec import Family, ModelSpec, layers_of

if TYPE_CHECKING:
    from minisgl.models.config import ModelConfig


def spec(config: ModelConfig) -> ModelSpec:
    layers = layers_of(config, (qwen_window(config),) * config.num_layers)
    return replace(qwen3.spec(config), layers=layers, moe=qwen_mixture(config))


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
