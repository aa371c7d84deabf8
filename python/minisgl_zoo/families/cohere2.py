"""Cohere 2 (Command R7B, Command A): Cohere with windows in three of four layers. Only the layers
with a window rotate."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from minisgl.models.families.layer_types import SLIDING
from minisgl.models.spec import ModelSpec
from minisgl_zoo.blocks.layer_types import layer_types, layers_of_types
from minisgl_zoo.blocks.parallel import ParallelBlock
from minisgl_zoo.blocks.rotation import no_rotation
from minisgl_zoo.families import cohere

if TYPE_CHECKING:
    from minisgl.models.config import ModelConfig


def spec(config: ModelConfig) -> ModelSpec:
    period = config.fields.integer("sliding_window_pattern", 4)
    types = layer_types(config, period)
    none = no_rotation(config)
    return replace(
        cohere.spec(config),
        layers=layers_of_types(
            config,
            types,
            ropes=[config.rope if kind == SLIDING else none for kind in types],
            block=ParallelBlock,
        ),
    )


FAMILY = replace(
    cohere.FAMILY,
    architectures=("Cohere2ForCausalLM",),
    spec=spec,
    defaults={**cohere.FAMILY.defaults, "sliding_window": 4096, "rope_theta": 10_000.0},
)
