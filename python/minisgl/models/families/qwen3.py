"""Qwen3 (dense): queries and keys are normed per head; windows as in Qwen2."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minisgl.models.families.qwen2 import qwen_windows
from minisgl.models.spec import Family, ModelSpec, layers_of

if TYPE_CHECKING:
    from minisgl.models.config import ModelConfig


def spec(config: ModelConfig) -> ModelSpec:
    attention_bias = config.fields.flag("attention_bias", False)
    return ModelSpec(
        config=config,
        layers=layers_of(config, qwen_windows(config)),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        qk_norm=True,
    )


FAMILY = Family(
    architectures=("Qwen3ForCausalLM",),
    spec=spec,
    defaults={
        "head_dim": 128,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "num_key_value_heads": 32,
    },
)
