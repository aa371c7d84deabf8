"""InternLM3: a Llama whose biases have names of their own in config.json."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minisgl.models.spec import Family, ModelSpec, layers_of

if TYPE_CHECKING:
    from minisgl.models.config import ModelConfig


def spec(config: ModelConfig) -> ModelSpec:
    bias = config.fields.flag("bias", False)
    return ModelSpec(
        config=config,
        layers=layers_of(config),
        qkv_bias=config.fields.flag("qkv_bias", False),
        o_bias=bias,
        mlp_bias=bias,
    )


FAMILY = Family(
    architectures=("InternLM3ForCausalLM",),
    spec=spec,
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 32_768,
    },
)
