"""Cohere (Command R, Command R+, Aya): attention and MLP side by side on one layer norm,
interleaved rotation; in Command R+ each head of queries and keys has a layer norm."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from minisgl.models.spec import Family, ModelSpec, layers_of
from minisgl_zoo.blocks.parallel import NormedHeadsBlock, ParallelBlock
from minisgl_zoo.blocks.scaled import ScaledDecoder
from minisgl_zoo.blocks.views import interleaved

if TYPE_CHECKING:
    from minisgl.models.config import ModelConfig


def block_of(config: ModelConfig) -> type[ParallelBlock]:
    """Return the block of config.json's `use_qk_norm`."""
    return NormedHeadsBlock if config.fields.flag("use_qk_norm", False) else ParallelBlock


def spec(config: ModelConfig) -> ModelSpec:
    fields = config.fields
    bias = fields.flag("attention_bias", False)
    return ModelSpec(
        config=config,
        layers=layers_of(config, block=block_of(config)),
        qkv_bias=bias,
        o_bias=bias,
        decoder=partial(ScaledDecoder, logit_scale=fields.number("logit_scale", 0.0625)),
    )


FAMILY = Family(
    architectures=("CohereForCausalLM",),
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
