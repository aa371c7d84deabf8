"""Mistral: a Llama without biases, whose layers all attend within a window (unless it is null)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minisgl.models.spec import Family, ModelSpec, layers_of

if TYPE_CHECKING:
    from minisgl.models.config import ModelConfig


def spec(config: ModelConfig) -> ModelSpec:
    window = config.fields.optional_integer("sliding_window")
    return ModelSpec(config=config, layers=layers_of(config, (window,) * config.num_layers))


FAMILY = Family(
    architectures=("MistralForCausalLM",),
    spec=spec,
    defaults={"sliding_window": 4096, "num_key_value_heads": 8},
)
