"""GLM-4-9B (2024): half of a head rotates, in interleaved pairs; gate and up are one tensor, as
transformers has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minisgl.models.spec import Family, ModelSpec, layers_of
from minisgl_zoo.blocks.views import interleaved

if TYPE_CHECKING:
    from minisgl.models.blocks.decoder import Block
    from minisgl.models.config import ModelConfig


def spec(config: ModelConfig, block: type[Block] | None = None) -> ModelSpec:
    return ModelSpec(
        config=config,
        layers=layers_of(config, block=block),
        qkv_bias=config.fields.flag("attention_bias", True),
    )


FAMILY = Family(
    architectures=("GlmForCausalLM",),
    spec=spec,
    view=interleaved,
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 128,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1.5625e-07,
        "max_position_embeddings": 131072,
    },
)
