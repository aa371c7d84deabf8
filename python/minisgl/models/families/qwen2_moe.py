"""Qwen2-MoE: Qwen2 with a mixture in most layers, and an expert that every token takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minisgl.models.families.qwen2 import qwen_window, qwen_windows
from minisgl.models.families.qwen_mixture import qwen_mixture
from minisgl.models.spec import Family, ModelSpec, layers_of

if TYPE_CHECKING:
    from minisgl.models.config import ModelConfig


def spec(config: ModelConfig) -> ModelSpec:
    """Without the field `layer_types`, every other layer below `max_window_layers` has the window,
    as in Hugging Face."""
    fields, window = config.fields, qwen_window(config)
    first = fields.integer("max_window_layers", minimum=0)
    windows = tuple(window if i % 2 == 0 and i < first else None for i in range(config.num_layers))
    if fields.values.get("layer_types") is not None:
        windows = qwen_windows(config)
    return ModelSpec(
        config=config,
        layers=layers_of(config, windows),
        qkv_bias=fields.flag("qkv_bias", True),
        moe=qwen_mixture(config, shared_size=fields.integer("shared_expert_intermediate_size")),
    )


FAMILY = Family(
    architectures=("Qwen2MoeForCausalLM",),
    spec=spec,
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
