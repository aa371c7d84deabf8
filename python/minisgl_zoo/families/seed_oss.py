"""Seed-OSS: a Llama in which each kind of projection may have biases."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minisgl.models.spec import Family, ModelSpec, layers_of

if TYPE_CHECKING:
    from minisgl.models.config import ModelConfig


def spec(config: ModelConfig) -> ModelSpec:
    return ModelSpec(
        config=config,
        layers=layers_of(config),
        qkv_bias=config.fields.flag("attention_bias", True),
        o_bias=config.fields.flag("attention_out_bias", False),
        mlp_bias=config.fields.flag("mlp_bias", False),
    )


FAMILY = Family(
    architectures=("SeedOssForCausalLM",),
    spec=spec,
    defaults={"head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 524288},
)
