"""Llama 1, Llama 2 and Llama 3 (Llama 3.1, Llama 3.2, Llama 3.3): no norms on heads, no window,
biases where config.json asks for them."""

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
