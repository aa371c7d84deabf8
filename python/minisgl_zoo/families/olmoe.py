"""OLMoE: a Llama with a mixture in each layer; queries and keys are normed over all heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minisgl.models.families.mixtures import qwen_mixture
from minisgl.models.spec import Family, ModelSpec, layers_of
from minisgl_zoo.blocks.attention import WideNormBlock

if TYPE_CHECKING:
    from minisgl.models.config import ModelConfig


def spec(config: ModelConfig) -> ModelSpec:
    if config.fields.values.get("clip_qkv") is not None:
        raise config.fields.error("clip_qkv", "null: OLMoE was released without")
    bias = config.fields.flag("attention_bias", False)
    return ModelSpec(
        config=config,
        layers=layers_of(config, block=WideNormBlock),
        qkv_bias=bias,
        o_bias=bias,
        moe=qwen_mixture(config),
    )


FAMILY = Family(
    architectures=("OlmoeForCausalLM",),
    spec=spec,
    defaults={
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "intermediate_size": 2048,
        "moe_intermediate_size": 2048,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
    },
    renames={"intermediate_size": "moe_intermediate_size"},
)
