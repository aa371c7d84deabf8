"""Gemma 4 (text): layers without a window have wide heads; keys may serve as values, and layers may
share them; each layer may have its own embedding; a mixture may run beside the MLP."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minisgl.attention.base import KV_SHARING
from minisgl.models.families.layer_types import FULL, SLIDING
from minisgl.models.spec import Family, ModelSpec
from minisgl_zoo.blocks.gemma4_block import Gemma4Decoder
from minisgl_zoo.blocks.gemma4_experts import experts_beside
from minisgl_zoo.blocks.gemma4_layers import gemma4_layers
from minisgl_zoo.blocks.layer_types import layer_types

if TYPE_CHECKING:
    from minisgl.models.config import ModelConfig


def spec(config: ModelConfig) -> ModelSpec:
    fields = config.fields
    if fields.values.get("use_bidirectional_attention") == "all":
        raise fields.error("use_bidirectional_attention", "null: a decoder is causal")
    types = (*layer_types(config, period=6)[:-1], FULL)  # the last is full, whatever the file says
    num_shared = fields.integer("num_kv_shared_layers", 0, minimum=0)
    num_own = max(config.num_layers - num_shared, 0)
    if len(set(types[:num_own])) < len(set(types)):
        raise fields.error("num_kv_shared_layers", "fewer: one layer of each type must have keys")
    bias = fields.flag("attention_bias", False)
    return ModelSpec(
        config=config,
        layers=gemma4_layers(config, types, num_own),
        qkv_bias=bias,
        o_bias=bias,
        attention=(KV_SHARING,) if num_shared else (),
        moe=experts_beside(config),
        decoder=Gemma4Decoder,
    )


FAMILY = Family(
    architectures=("Gemma4ForCausalLM",),
    spec=spec,
    defaults={
        "vocab_size": 262_144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
        "sliding_window": 512,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262_144,
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
            FULL: {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1e6,
            },
        },
    },
    renames={"hidden_activation": "hidden_act", "top_k_experts": "num_experts_per_tok"},
    layer_ropes=True,
)
