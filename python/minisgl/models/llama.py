"""Llama 1 to 3.x: no norms on heads, no window, biases where config.json asks for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minisgl.models.spec import Family, ModelSpec, layers_of

if TYPE_CHECKING:
    from minisgl.models.config import ModelConfig


def spec(config: ModelConfig) -> ModelSpec:
    attention_bias = config.fields.flag("attention_bias", False)
    return ModelSpec(
        config=config,
        layers=layers_of(config),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=config.fields.flag("mlp_bias", False),
    )


FAMILY = Family(architectures=("LlamaForCausalLM",), spec=spec)
