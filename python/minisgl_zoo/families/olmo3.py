"""OLMo 3: OLMo 2 with windows in three of four layers, whose rotation is never stretched."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from minisgl.models.families.layer_types import SLIDING
from minisgl.models.spec import Family, ModelSpec
from minisgl_zoo.blocks.layer_types import layer_types, layers_of_types
from minisgl_zoo.blocks.rotation import sliding_rope
from minisgl_zoo.families import olmo2

if TYPE_CHECKING:
    from minisgl.models.config import ModelConfig


def spec(config: ModelConfig) -> ModelSpec:
    types = layer_types(config, period=4)
    windowed = sliding_rope(config, config.rope.theta)
    return replace(
        olmo2.spec(config),
        layers=layers_of_types(
            config,
            types,
            ropes=[windowed if kind == SLIDING else config.rope for kind in types],
            block=olmo2.Olmo2Block,
        ),
    )


FAMILY = Family(
    architectures=("Olmo3ForCausalLM",),
    spec=spec,
    defaults={**olmo2.FAMILY.defaults, "sliding_window": 4096, "rope_theta": 500_000.0},
    layer_ropes=True,
)
