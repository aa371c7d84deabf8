"""Qwen3.5, Qwen3.6 and Qwen3-Next: hybrids of gated delta nets and attention with a gate, whose
norms multiply by 1 + the checkpoint's weight. Also Mellum 2, and Qwen3-VL's mixtures.

`defaults` are the values of each family's config class in transformers.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from minisgl.models.blocks.decoder import Block
from minisgl.models.blocks.mixture import MoeSpec
from minisgl.models.config import ModelConfig
from minisgl.models.families.dense import FULL, SLIDING, plain, types_in_config
from minisgl.models.families.mixtures import QWEN3_MOE, qwen_mixture
from minisgl.models.spec import Family, LayerSpec, layers_of
from minisgl_zoo.blocks.delta_net import GatedDeltaNet
from minisgl_zoo.blocks.gated_attention import GatedAttention
from minisgl_zoo.blocks.gemma import GemmaNorm, GemmaNormFused
from minisgl_zoo.blocks.layer_kinds import (
    layer_types,
    layers_of_types,
    refuse,
    sliding_rope,
    sparse_layers,
)
from minisgl_zoo.blocks.next_tokens import NextTokenLayer, predicting
from minisgl_zoo.blocks.views import TransposedExperts
from minisgl_zoo.recurrent.spec import DeltaSpec
from minisgl_zoo.view import CheckpointView

LINEAR = "linear_attention"


class HybridAttention(GatedAttention):
    head_norm_type = GemmaNorm


class GatedAttentionBlock(Block):
    norm_type = GemmaNormFused
    attention_type = HybridAttention


class DeltaBlock(Block):
    norm_type = GemmaNormFused
    attention_type = GatedDeltaNet


def hybrid_layers(config: ModelConfig, *, fused: bool) -> tuple[LayerSpec, ...]:
    """Return the layers that the field `layer_types` describes. Without it, every
    `full_attention_interval`-th layer has attention. fused: see `DeltaSpec`. Raises ConfigError."""
    fields = config.fields
    period = fields.integer("full_attention_interval", 4)
    types = types_in_config(config, (FULL, LINEAR)) or tuple(
        LINEAR if (index + 1) % period else FULL for index in range(config.num_layers)
    )
    num_heads = fields.integer("linear_num_value_heads")
    num_key_heads = fields.integer("linear_num_key_heads")
    if num_heads % num_key_heads:
        raise fields.error("linear_num_key_heads", f"a divisor of {num_heads} value heads")
    delta = DeltaSpec(
        value_dim=fields.integer("linear_value_head_dim"),
        taps=fields.integer("linear_conv_kernel_dim", minimum=2),
        fused=fused,
    )
    attention = layers_of(config, block=GatedAttentionBlock)
    delta_nets = layers_of(
        config,
        num_heads=num_heads,
        num_kv_heads=num_key_heads,
        head_dim=fields.integer("linear_key_head_dim"),
        block=DeltaBlock,
        recurrent=delta,
    )
    return tuple(
        (attention if kind == FULL else delta_nets)[index] for index, kind in enumerate(types)
    )


def hybrid_mixture(config: ModelConfig) -> MoeSpec:
    return qwen_mixture(config, config.fields.integer("shared_expert_intermediate_size"))


def mellum_layers(config: ModelConfig) -> tuple[LayerSpec, ...]:
    ropes = {SLIDING: sliding_rope(config, 10_000.0)}
    return layers_of_types(config, layer_types(config), ropes)


def mellum_mixture(config: ModelConfig) -> MoeSpec:
    return replace(qwen_mixture(config), is_sparse=sparse_layers(config))


def without_mellum_drafts(view: CheckpointView, config: ModelConfig) -> CheckpointView:
    """Leave out the layer of multi-token prediction, as each view does."""
    return view


class HybridNextTokens(NextTokenLayer):
    """Its tensors are beside the model's, and its norms are as the model's."""

    norm_type, state_norm_type = GemmaNormFused, GemmaNorm
    prefix, block_prefix = "mtp", "mtp.layers.0"
    names = "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"


def with_drafts(view: CheckpointView, config: ModelConfig) -> CheckpointView:
    """Return the view, which has the layer of multi-token prediction if it is asked for. Raises
    ConfigError if the files have none, or another form of it."""
    if config.mtp:
        fields = config.fields
        view.need("mtp.", "--drafts mtp")
        refuse(fields, "mtp_use_dedicated_embeddings", "--drafts mtp takes the model's embedding")
        if fields.integer(COUNT, 1) > 1:
            raise fields.error(COUNT, "1, since --drafts mtp serves no chain of layers")
    return view


HYBRID = {
    "num_key_value_heads": 2,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
MIXTURE = {
    "intermediate_size": 5632,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
}
COUNT = "mtp_num_hidden_layers"
"""Qwen3-Next's files have the layer, and their config.json does not say so."""
hybrid = partial(plain, layers=partial(hybrid_layers, fused=False), qk_norm=True)
guessing = partial(predicting, kind=HybridNextTokens, count=COUNT, default=1)

QWEN3_5 = Family(
    spec=guessing(hybrid), defaults={**HYBRID, "num_key_value_heads": 4}, view=with_drafts
)
QWEN3_5MOE = Family(
    spec=guessing(partial(hybrid, moe=hybrid_mixture)),
    defaults={**HYBRID, **MIXTURE, "num_experts": 256, "num_experts_per_tok": 8},
    view=with_drafts,
)
QWEN3NEXT = Family(
    spec=guessing(partial(hybrid, layers=partial(hybrid_layers, fused=True), moe=hybrid_mixture)),
    defaults={**HYBRID, **MIXTURE, "num_experts": 512, "num_experts_per_tok": 10},
    view=with_drafts,
)
QWEN3VLMOETEXT = replace(
    QWEN3_MOE,
    view=TransposedExperts.of,
    defaults={
        **QWEN3_MOE.defaults,
        "num_key_value_heads": 16,
        "intermediate_size": 5632,
        "moe_intermediate_size": 1408,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
        "max_position_embeddings": 128_000,
    },
)
MELLUM = Family(
    spec=partial(plain, layers=mellum_layers, moe=mellum_mixture, qk_norm=True),
    view=without_mellum_drafts,
    defaults={
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "sliding_window": 1024,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 896,
        "norm_topk_prob": True,
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
            FULL: {"rope_type": "default", "rope_theta": 500_000.0},
        },
    },
    layer_ropes=True,
)
