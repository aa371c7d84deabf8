"""Cohere: attention and MLP side by side on one layer norm, interleaved rotation. Cohere 2 has
windows in three of four layers, and only those rotate.

`defaults` are the values of each family's config class in transformers.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from minisgl.models.config import ModelConfig
from minisgl.models.families.layer_types import FULL
from minisgl.models.spec import Family, ModelSpec, layers_of
from minisgl_zoo.blocks.layer_kinds import layer_types, layers_of_types, no_rotation, plain
from minisgl_zoo.blocks.parallel import NormedHeadsBlock, ParallelBlock
from minisgl_zoo.blocks.scaled import ScaledDecoder
from minisgl_zoo.blocks.views import interleaved


def spec(config: ModelConfig) -> ModelSpec:
    fields = config.fields
    block = NormedHeadsBlock if fields.flag("use_qk_norm", False) else ParallelBlock
    return plain(
        config,
        layers=partial(layers_of, block=block),
        decoder=partial(ScaledDecoder, logit_scale=fields.number("logit_scale", 0.0625)),
    )


def spec2(config: ModelConfig) -> ModelSpec:
    types = layer_types(config, config.fields.integer("sliding_window_pattern", 4))
    layers = layers_of_types(config, types, {FULL: no_rotation(config)}, block=ParallelBlock)
    return replace(spec(config), layers=layers)


COHERE = Family(
    spec=spec,
    defaults={
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
        "rope_theta": 500_000.0,
    },
    view=interleaved,
    renames={"layer_norm_eps": "rms_norm_eps"},
)
COHERE2 = replace(
    COHERE,
    spec=spec2,
    defaults={**COHERE.defaults, "sliding_window": 4096, "rope_theta": 10_000.0},
)
