"""EXAONE 4: norms after attention and MLP, norms on heads. If some layers have a window, only those
rotate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minisgl.models.families.layer_types import FULL, SLIDING
from minisgl.models.spec import Family, ModelSpec
from minisgl_zoo.blocks.layer_types import layer_types, layers_of_types
from minisgl_zoo.blocks.rotation import no_rotation
from minisgl_zoo.blocks.sandwich import PostNormBlock

if TYPE_CHECKING:
    from minisgl.models.blocks.decoder import Block
    from minisgl.models.config import ModelConfig
    from minisgl.models.spec import LayerSpec


def spec(config: ModelConfig) -> ModelSpec:
    layers = exaone_layers(config, PostNormBlock)
    return ModelSpec(config=config, layers=layers, qk_norm=True)


def exaone_layers(config: ModelConfig, block: type[Block]) -> tuple[LayerSpec, ...]:
    fields = config.fields
    window = fields.optional_integer("sliding_window")
    types = (FULL,) * config.num_layers
    ropes = [config.rope] * config.num_layers
    if window is not None:
        # The files of the 32B spell the period out as LLLG: three local layers, one global.
        pattern = fields.values.get("sliding_window_pattern")
        period = 4 if pattern == "LLLG" else fields.integer("sliding_window_pattern", 4)
        types = layer_types(config, period)
        none = no_rotation(config)
        ropes = [config.rope if kind == SLIDING else none for kind in types]
    return layers_of_types(config, types, ropes=ropes, block=block)


FAMILY = Family(
    architectures=("Exaone4ForCausalLM",),
    spec=spec,
    defaults={
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "sliding_window": 4096,
    },
)
