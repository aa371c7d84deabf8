"""Granite Swash: Granite 3 whose heads have sinks, with windows in three of four layers; a layer
may have a rotation of its own, or none."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from minisgl.attention.base import SINKS
from minisgl.models.families.layer_types import FULL, SLIDING, types_in_config
from minisgl_zoo.blocks.attention import SinkAttention
from minisgl_zoo.blocks.layer_types import layers_of_types
from minisgl_zoo.blocks.rotation import no_rotation
from minisgl_zoo.families import granite

if TYPE_CHECKING:
    from minisgl.layers.frequencies import RotaryConfig
    from minisgl.models.config import ModelConfig
    from minisgl.models.spec import ModelSpec


class SinkBlock(granite.GraniteBlock):
    attention_type = SinkAttention


def spec(config: ModelConfig) -> ModelSpec:
    types = types_in_config(config, (FULL, SLIDING)) or tuple(
        SLIDING if index % 4 else FULL for index in range(config.num_layers)
    )
    plain = granite.spec(config)
    layers = layers_of_types(
        config, types, ropes=_ropes(config), block=SinkBlock, scale=plain.layers[0].scale
    )
    return replace(plain, layers=layers, attention=(SINKS,))


def _ropes(config: ModelConfig) -> list[RotaryConfig]:
    """Return each layer's rotation. In the field `layer_rope_theta`, 0 is none."""
    fields, count = config.fields, config.num_layers
    thetas = fields.values.get("layer_rope_theta")
    if thetas is None:
        return [config.rope] * count
    is_list = type(thetas) is list and len(thetas) == count
    if not is_list or not all(type(theta) in (int, float) and theta >= 0 for theta in thetas):
        raise fields.error("layer_rope_theta", f"a list of {count} numbers, none below 0")
    none = no_rotation(config)
    return [replace(config.rope, theta=float(theta)) if theta else none for theta in thetas]


FAMILY = replace(
    granite.FAMILY,
    architectures=("GraniteSWAForCausalLM",),
    spec=spec,
    defaults={
        "num_key_value_heads": 4,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "sliding_window": 128,
    },
)
