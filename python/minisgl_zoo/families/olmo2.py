"""OLMo 2: norms after attention and MLP; queries and keys are normed over all heads together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minisgl.models.spec import Family, ModelSpec, layers_of
from minisgl_zoo.blocks.attention import WideNormAttention
from minisgl_zoo.blocks.sandwich import PostNormBlock

if TYPE_CHECKING:
    from minisgl.models.config import ModelConfig


class Olmo2Block(PostNormBlock):
    attention_type = WideNormAttention


def spec(config: ModelConfig) -> ModelSpec:
    bias = config.fields.flag("attention_bias", False)
    layers = layers_of(config, block=Olmo2Block)
    return ModelSpec(config=config, layers=layers, qkv_bias=bias, o_bias=bias)


FAMILY = Family(
    architectures=("Olmo2ForCausalLM",),
    spec=spec,
    defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 2048},
)
