"""ERNIE 4.5 (dense): a Llama whose heads rotate interleaved pairs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minisgl.models.spec import Family, ModelSpec, layers_of
from minisgl_zoo.blocks.views import interleaved

if TYPE_CHECKING:
    from minisgl.models.config import ModelConfig


def spec(config: ModelConfig) -> ModelSpec:
    bias = config.fields.flag("use_bias", False)
    return ModelSpec(
        config=config, layers=layers_of(config), qkv_bias=bias, o_bias=bias, mlp_bias=bias
    )


FAMILY = Family(
    architectures=("Ernie4_5ForCausalLM",),
    spec=spec,
    view=interleaved,
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
        "max_position_embeddings": 131_072,
    },
)
