"""Youtu (Youtu-LLM): DeepSeek-V3's attention, and an MLP in each layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minisgl.attention.base import LATENTS
from minisgl.models.spec import Family, ModelSpec
from minisgl_zoo.blocks.latent_attention import latent_layers

if TYPE_CHECKING:
    from minisgl.models.config import ModelConfig


def spec(config: ModelConfig) -> ModelSpec:
    return ModelSpec(config=config, layers=latent_layers(config), attention=(LATENTS,))


FAMILY = Family(
    architectures=("YoutuForCausalLM",),
    spec=spec,
    defaults={
        "num_key_value_heads": 16,
        "head_dim": 64,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
    },
)
