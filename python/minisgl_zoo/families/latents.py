"""DeepSeek-V3 and the families with its attention to latents.

`defaults` are the values of each family's config class in transformers.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from minisgl.attention.base import LATENTS
from minisgl.models.blocks.decoder import LayerBuild
from minisgl.models.blocks.mixture import MoeSpec
from minisgl.models.config import ModelConfig
from minisgl.models.families.dense import plain
from minisgl.models.loading.rotation import rotary_config
from minisgl.models.spec import Family, LayerSpec
from minisgl_zoo.blocks.attention import position_scale
from minisgl_zoo.blocks.latent_attention import (
    LatentAttention,
    LatentBlock,
    LatentSizes,
    latent_layers,
)
from minisgl_zoo.blocks.layer_kinds import refuse, rope_fields
from minisgl_zoo.blocks.next_tokens import predicting
from minisgl_zoo.blocks.routers import SoftmaxExperts, sigmoid_mixture
from minisgl_zoo.families.sigmoid_mixtures import without_drafts

BEST: dict[object, int | None] = {"greedy": None, "group_limited_greedy": 1}
"""`topk_method` of config.json -> see `SoftmaxExperts`."""


def v2_mixture(config: ModelConfig) -> MoeSpec:
    fields, mixture = config.fields, sigmoid_mixture(config)
    method = str(fields.values["topk_method"])
    if method not in BEST:
        raise fields.error("topk_method", f"one of {', '.join(map(str, BEST))}")
    refuse(fields, "norm_topk_prob", "transformers does not read it")
    layer = partial(SoftmaxExperts, config=config, best=BEST[method])
    return replace(mixture, layer=layer, renormalise=False)


class Mistral4Attention(LatentAttention):
    """Queries have Ministral 3's scale."""

    def __init__(self, at: LayerBuild) -> None:
        super().__init__(at)
        self.beta = rope_fields(at.spec.config).number("llama_4_scaling_beta")

    def scaled(self, q_TNK: Tensor, positions_T: Tensor) -> Tensor:
        length = self.rope.config.original_max_position
        return q_TNK * position_scale(positions_T, self.beta, length).to(q_TNK.dtype)


class Mistral4Block(LatentBlock):
    attention_type = Mistral4Attention


def mistral4_layers(config: ModelConfig) -> tuple[LayerSpec, ...]:
    sizes = LatentSizes.of(config)
    rope = rotary_config(config.fields, sizes.plain + sizes.rotated)
    if rope.rotary_dim != sizes.rotated:
        expected = f"a partial_rotary_factor that rotates {sizes.rotated} dims (qk_rope_head_dim)"
        raise config.fields.error("rope_parameters", expected)
    return tuple(replace(layer, block=Mistral4Block) for layer in latent_layers(config, rope))


def mistral4_mixture(config: ModelConfig) -> MoeSpec:
    layer = partial(SoftmaxExperts, config=config, best=2)
    return replace(sigmoid_mixture(config), layer=layer)


latent = partial(plain, layers=latent_layers, attention=(LATENTS,), qkv_bias=False, o_bias=False)

SIZES: dict[str, Any] = {
    "head_dim": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
"""What most families with this attention default to."""

DEEPSEEKV3 = Family(
    spec=predicting(partial(latent, moe=sigmoid_mixture)),
    view=without_drafts,
    defaults={
        **SIZES,
        "num_key_value_heads": 128,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "max_position_embeddings": 4096,
    },
)
DEEPSEEKV2 = Family(
    spec=partial(latent, moe=v2_mixture),
    view=without_drafts,
    defaults={
        **SIZES,
        "first_k_dense_replace": 0,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
        "topk_method": "greedy",
        "max_position_embeddings": 2048,
    },
)
GLM4MOELITE = replace(
    DEEPSEEKV3,
    defaults={
        **SIZES,
        "num_key_value_heads": 20,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1536,
        "routed_scaling_factor": 1.8,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 202_752,
    },
)
MISTRAL4 = Family(
    spec=partial(latent, layers=mistral4_layers, moe=mistral4_mixture),
    view=without_drafts,
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
YOUTU = Family(
    spec=latent,
    defaults={
        **SIZES,
        "num_key_value_heads": 16,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
    },
)
