"""Mistral: a Llama without biases, whose layers all attend within a window (unless it is null)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minisgl.models.spec import Family, ModelSpec

if TYPE_CHECKING:
    from minisgl.models.config import ModelConfig


def spec(config: ModelConfig) -> ModelSpec:
    return ModelSpec(
        config=config,
        windows=(config.fields.optional_integer("sliding_window"),) * config.num_layers,
    )


FAMILY = Family(
    architectures=("MistralForCausalLM",),
    spec=spec,
    defaults={"sliding_window": 4096, "num_key_value_heads": 8},
)
