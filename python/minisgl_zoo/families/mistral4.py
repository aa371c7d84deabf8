"""Mistral 4 (Mistral Small 4): DeepSeek-V3's attention with Ministral 3's scale of queries; its
mixtures have a router of softmax, and an expert that every token takes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from minisgl.attention.base import LATENTS
from minisgl.models.loading.rotation import rotary_config
from minisgl.models.spec import ModelSpec
from minisgl_zoo.blocks.latent_attention import (
    LatentAttention,
    LatentBlock,
    LatentSizes,
    latent_layers,
)
from minisgl_zoo.blocks.rotation import rope_fields
from minisgl_zoo.blocks.routers import SoftmaxExperts
from minisgl_zoo.families import glm4_moe
from minisgl_zoo.families.ministral3 import position_scale

if TYPE_CHECKING:
    from torch import Tensor

    from minisgl.models.blocks.decoder import LayerBuild
    from minisgl.models.config import ModelConfig


class Mistral4Attention(LatentAttention):
    def __init__(self, at: LayerBuild) -> None:
        super().__init__(at)
        self.beta = rope_fields(at.spec.config).number("llama_4_scaling_beta")

    def scaled(self, q_TNK: Tensor, positions_T: Tensor) -> Tensor:
        length = self.rope.config.original_max_position
        return q_TNK * position_scale(positions_T, self.beta, length).to(q_TNK.dtype)


class Mistral4Block(LatentBlock):
    attention_type = Mistral4Attention


def spec(config: ModelConfig) -> ModelSpec:
    sizes = LatentSizes.of(config)
    rope = rotary_config(config.fields, sizes.plain + sizes.rotated)
    if rope.rotary_dim != sizes.rotated:
        expected = f"a partial_rotary_factor that rotates {sizes.rotated} dims (qk_rope_head_dim)"
        raise config.fields.error("rope_parameters", expected)
    layer = partial(SoftmaxExperts, config=config, best=2)
    return ModelSpec(
        config=config,
        layers=tuple(replace(each, block=Mistral4Block) for each in latent_layers(config, rope)),
        attention=(LATENTS,),
        moe=replace(glm4_moe.sigmoid_mixture(config), layer=layer),
    )


FAMILY = replace(
    glm4_moe.FAMILY,
    architectures=("Mistral4ForCausalLM",),
    spec=spec,
    defaults={
        "num_key_value_heads": 32,
        "head_dim": 128,
        "intermediate_size": 12_288,
        "first_k_dense_replace": 0,
        "n_routed_experts": 128,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 2048,
        "q_lora_rank": 1024,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "max_position_embeddings": 1_048_576,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 128.0,
            "original_max_position_embeddings": 8192,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale_all_dim": 1.0,
            "mscale": 1.0,
            "llama_4_scaling_beta": 0.1,
            "partial_rotary_factor": 0.5,
        },
    },
)
