"""LFM2 and LFM3: gated short convolutions in most layers; the others have attention with normed
heads. In LFM3 each head's output has a gate, and norms go before and after both halves of a block.

`defaults` are the values of each family's config class in transformers.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from minisgl.models.blocks.decoder import Attention, Block, LayerBuild
from minisgl.models.blocks.mixture import MoeSpec
from minisgl.models.config import ModelConfig
from minisgl.models.families.dense import FULL, SLIDING, plain, types_in_config
from minisgl.models.spec import Family, LayerSpec, ModelSpec
from minisgl_zoo.blocks.gated_attention import GatedAttention
from minisgl_zoo.blocks.layer_kinds import layers_of_types, refuse, sliding_rope
from minisgl_zoo.blocks.routers import CORRECTION, SigmoidExperts, sigmoid_mixture
from minisgl_zoo.blocks.sandwich import SandwichBlock
from minisgl_zoo.blocks.short_conv import CONV, ShortConv, conv_layers, with_convs


class Lfm2Experts(SigmoidExperts):
    sum_eps = 1e-6


class HeadGatedAttention(GatedAttention):
    gate_name, gate_size = "gate_proj", 1


def _mixer(at: LayerBuild) -> Attention | ShortConv:
    """Return what a block has in the place of attention."""
    if at.layer.recurrent:
        return ShortConv(at)
    is_gated = at.spec.config.fields.flag("use_attention_gate", True)
    return HeadGatedAttention(at) if is_gated else Attention(at)


class Lfm3Block(SandwichBlock):
    attention_type = staticmethod(_mixer)
    norm_names = (
        "input_layernorm",
        "post_operator_norm",
        "post_attention_layernorm",
        "post_ffn_norm",
    )


class PreNormBlock(Block):
    attention_type = staticmethod(_mixer)


def lfm2(config: ModelConfig) -> ModelSpec:
    fields, width = config.fields, config.intermediate_size
    if fields.flag("block_auto_adjust_ff_dim", True):
        unit = fields.integer("block_multiple_of", 256)
        factor = fields.number("block_ffn_dim_multiplier", 1.0)
        if factor > 1024:
            raise fields.error("block_ffn_dim_multiplier", "at most 1024")
        width = int(factor * int(2 * width / 3))
        config = replace(config, intermediate_size=-(-width // unit) * unit)
    return lfm(config)


def lfm2_mixture(config: ModelConfig) -> MoeSpec:
    fields = config.fields
    if not fields.flag("use_expert_bias", True):
        raise fields.error("use_expert_bias", "true: a router without a correction is not served")
    return sigmoid_mixture(
        config, experts="num_experts", dense="num_dense_layers", shared=None, layer=Lfm2Experts
    )


def lfm3_layers(config: ModelConfig) -> tuple[LayerSpec, ...]:
    """Convolutions, attention within a window and attention to all take turns."""
    fields = config.fields
    refuse(fields, "attention_bias", "biases of attention are not supported")
    types = types_in_config(config, (FULL, SLIDING, CONV)) or tuple(
        _kind(index) for index in range(config.num_layers)
    )
    block = Lfm3Block if fields.flag("use_sandwich_norm", True) else PreNormBlock
    ropes = {SLIDING: sliding_rope(config, 10_000.0)}
    layers = layers_of_types(config, types, ropes, block=block)
    return with_convs(config, layers, types, block)


def _kind(index: int) -> str:
    """Return the type of a layer if config.json has no `layer_types`."""
    if index % 4 == 2:
        return FULL
    return CONV if index % 4 or not index else SLIDING


lfm = partial(plain, layers=conv_layers, qkv_bias=False, o_bias=False, qk_norm=True)

NAMES = {
    ".operator_norm.": ".input_layernorm.",
    ".ffn_norm.": ".post_attention_layernorm.",
    "model.embedding_norm.": "model.norm.",
    ".self_attn.out_proj.": ".self_attn.o_proj.",
    ".q_layernorm.": ".q_norm.",
    ".k_layernorm.": ".k_norm.",
    ".feed_forward.expert_bias": f".feed_forward.gate.{CORRECTION}",
    ".feed_forward.": ".mlp.",
    ".w1.": ".gate_proj.",
    ".w2.": ".down_proj.",
    ".w3.": ".up_proj.",
}
DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 128_000,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    "conv_L_cache": 3,
}
RENAMES = {"norm_eps": "rms_norm_eps", "tie_embedding": "tie_word_embeddings"}

LFM2 = Family(
    spec=lfm2,
    defaults=DEFAULTS,
    renames={**RENAMES, "block_ff_dim": "intermediate_size", "block_norm_eps": "rms_norm_eps"},
    names=NAMES,
)
LFM2MOE = Family(
    spec=partial(lfm, moe=lfm2_mixture),
    defaults={
        **DEFAULTS,
        "moe_intermediate_size": 1792,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "num_dense_layers": 2,
    },
    renames=RENAMES,
    names=NAMES,
)
LFM3 = Family(
    spec=partial(lfm, layers=lfm3_layers),
    defaults={
        "vocab_size": 128_000,
        "hidden_size": 2048,
        "intermediate_size": 7680,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 128_000,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "conv_L_cache": 7,
        "sliding_window": 256,
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
            FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e6},
        },
    },
    renames={"norm_eps": "rms_norm_eps"},
    names={**NAMES, ".self_attn.g_proj.": ".self_attn.gate_proj."},
    layer_ropes=True,
)
