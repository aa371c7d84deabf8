"""DeepSeek-V3, DeepSeek-R1, Kimi K2 and Moonlight: attention to latents; all but the first layers
have GLM-4.5's mixture."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from minisgl.attention.base import LATENTS
from minisgl.models.spec import ModelSpec
from minisgl_zoo.blocks.latent_attention import latent_layers
from minisgl_zoo.families import glm4_moe

if TYPE_CHECKING:
    from minisgl.models.config import ModelConfig


def spec(config: ModelConfig) -> ModelSpec:
    return ModelSpec(
        config=config,
        layers=latent_layers(config),
        attention=(LATENTS,),
        moe=glm4_moe.sigmoid_mixture(config),
    )


FAMILY = replace(
    glm4_moe.FAMILY,
    architectures=("DeepseekV3ForCausalLM",),
    spec=spec,
    defaults={
        "num_key_value_heads": 128,
        "head_dim": 64,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "max_position_embeddings": 4096,
    },
)
