"""dots.llm1 (Dots1): Qwen3's attention; all but the first layers have GLM-4.5's mixture."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from minisgl.models.families.layer_types import FULL, SLIDING, types_in_config
from minisgl.models.spec import Family, ModelSpec
from minisgl_zoo.blocks.layer_types import layers_of_types
from minisgl_zoo.families import glm4_moe

if TYPE_CHECKING:
    from minisgl.models.config import ModelConfig


def spec(config: ModelConfig) -> ModelSpec:
    fields = config.fields
    bias = fields.flag("attention_bias", False)
    first = fields.integer("max_window_layers", 62, minimum=0)
    if fields.optional_integer("sliding_window") is None:
        first = config.num_layers
    types = types_in_config(config, (FULL, SLIDING)) or tuple(
        SLIDING if index >= first else FULL for index in range(config.num_layers)
    )
    moe = glm4_moe.sigmoid_mixture(config)
    num_shared = fields.integer("n_shared_experts", minimum=0)  # unlike GLM's, without a default
    return ModelSpec(
        config=config,
        layers=layers_of_types(config, types),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        moe=replace(moe, shared_size=num_shared * moe.inner_size),
    )


FAMILY = Family(
    architectures=("Dots1ForCausalLM",),
    spec=spec,
    defaults={
        "num_key_value_heads": 32,
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
        "max_position_embeddings": 2048,
        "sliding_window": 4096,
    },
)
