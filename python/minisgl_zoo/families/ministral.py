"""Ministral (8B, 2410): a Mistral in which only some layers may have a window."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minisgl.models.families.dense import MISTRAL
from minisgl.models.spec import Family, ModelSpec
from minisgl_zoo.blocks.layer_types import layer_types, layers_of_types

if TYPE_CHECKING:
    from minisgl.models.config import ModelConfig


def spec(config: ModelConfig) -> ModelSpec:
    if config.fields.values.get("layer_types") is None:
        return MISTRAL.spec(config)
    return ModelSpec(config=config, layers=layers_of_types(config, layer_types(config)))


FAMILY = Family(
    architectures=("MinistralForCausalLM",),
    spec=spec,
    defaults=MISTRAL.defaults,
)
