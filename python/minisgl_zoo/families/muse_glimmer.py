"""Muse-Glimmer (text): Gemma 2's order of norms; embedding, queries and keys are normed without a
weight; attention's output has a gate; layers without a window do not rotate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minisgl.models.families.layer_types import FULL, SLIDING
from minisgl.models.spec import Family, ModelSpec
from minisgl_zoo.blocks.layer_types import layer_types, layers_of_types
from minisgl_zoo.blocks.muse_glimmer_block import MuseGlimmerBlock, MuseGlimmerDecoder
from minisgl_zoo.blocks.rotation import no_rotation

if TYPE_CHECKING:
    from minisgl.models.config import ModelConfig


def spec(config: ModelConfig) -> ModelSpec:
    fields, count = config.fields, config.num_layers
    if fields.flag("attention_bias", False):
        raise fields.error("attention_bias", "false: biases of attention are not supported")
    # The last layer is full, and every fourth one before it.
    full = [(count - 1 - index) % 4 == 0 for index in range(count)]
    types = layer_types(config)
    if fields.values.get("layer_types") is None:
        types = tuple(FULL if is_full else SLIDING for is_full in full)
    thetas = fields.values.get("layer_rope_theta") or [not is_full for is_full in full]
    if type(thetas) is not list or len(thetas) != count:
        raise fields.error("layer_rope_theta", f"a list of {count}")
    none = no_rotation(config)
    return ModelSpec(
        config=config,
        layers=layers_of_types(
            config,
            types,
            ropes=[config.rope if theta else none for theta in thetas],
            block=MuseGlimmerBlock,
            scale=fields.number("qk_scale_factor", 3.87) * config.head_dim**-0.5,
        ),
        decoder=MuseGlimmerDecoder,
    )


FAMILY = Family(
    architectures=("MuseGlimmerForCausalLM",),
    spec=spec,
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "sliding_window": 2048,
    },
    renames={"hidden_activation": "hidden_act"},
)
