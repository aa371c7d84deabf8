"""LFM2: gated short convolutions in most layers; the others have attention, whose heads are
normed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from minisgl.models.spec import Family, ModelSpec
from minisgl_zoo.blocks.short_conv import conv_layers

if TYPE_CHECKING:
    from minisgl.models.config import ModelConfig


def spec(config: ModelConfig) -> ModelSpec:
    fields, width = config.fields, config.intermediate_size
    if fields.flag("block_auto_adjust_ff_dim", True):
        unit = fields.integer("block_multiple_of", 256)
        factor = fields.number("block_ffn_dim_multiplier", 1.0)
        if factor > 1024:
            raise fields.error("block_ffn_dim_multiplier", "at most 1024")
        width = int(factor * int(2 * width / 3))
        config = replace(config, intermediate_size=-(-width // unit) * unit)
    return ModelSpec(config=config, layers=conv_layers(config), qk_norm=True)


NAMES = {
    ".operator_norm.": ".input_layernorm.",
    ".ffn_norm.": ".post_attention_layernorm.",
    "model.embedding_norm.": "model.norm.",
    ".self_attn.out_proj.": ".self_attn.o_proj.",
    ".q_layernorm.": ".q_norm.",
    ".k_layernorm.": ".k_norm.",
    ".feed_forward.expert_bias": ".feed_forward.gate.e_score_correction_bias",
    ".feed_forward.": ".mlp.",
    ".w1.": ".gate_proj.",
    ".w2.": ".down_proj.",
    ".w3.": ".up_proj.",
}
DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 128_000,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    "conv_L_cache": 3,
}
RENAMES = {"norm_eps": "rms_norm_eps", "tie_embedding": "tie_word_embeddings"}
FAMILY = Family(
    architectures=("Lfm2ForCausalLM",),
    spec=spec,
    defaults=DEFAULTS,
    renames={**RENAMES, "block_ff_dim": "intermediate_size", "block_norm_eps": "rms_norm_eps"},
    names=NAMES,
)
