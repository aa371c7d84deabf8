"""Qwen3.5 and Qwen3.6 (dense, text): gated delta nets in three of four layers, gated attention in
the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minisgl.models.spec import Family, ModelSpec
from minisgl_zoo.blocks.hybrid import DEFAULTS, hybrid_layers
from minisgl_zoo.view import text_only

if TYPE_CHECKING:
    from minisgl.models.config import ModelConfig


def spec(config: ModelConfig) -> ModelSpec:
    bias = config.fields.flag("attention_bias", False)
    return ModelSpec(
        config=config,
        layers=hybrid_layers(config, fused=False),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
    )


FAMILY = Family(
    architectures=("Qwen3_5ForCausalLM",),
    spec=spec,
    defaults={**DEFAULTS, "num_key_value_heads": 4},
    view=text_only,
)
