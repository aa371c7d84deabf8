"""Gemma 4 (text): layers without a window have wide heads; keys may be values, or another layer's;
parts of the embedding for each layer; a mixture beside the MLP."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from minisgl.attention.names import SHARED
from minisgl.models.config import Fields, rotary_config
from minisgl.models.gemma4_block import Gemma4Block, Gemma4Decoder
from minisgl.models.gemma4_experts import experts_beside
from minisgl.models.layer_types import FULL, SLIDING, layer_types, layers_of_types
from minisgl.models.spec import Family, ModelSpec

if TYPE_CHECKING:
    from minisgl.models.config import ModelConfig
    from minisgl.models.spec import LayerSpec


def spec(config: ModelConfig) -> ModelSpec:
    fields = config.fields
    if fields.values.get("use_bidirectional_attention") == "all":
        raise fields.error("use_bidirectional_attention", "null: a decoder is causal")
    types = (*layer_types(config, period=6)[:-1], FULL)  # the last is, whatever the file says
    num_shared = fields.integer("num_kv_shared_layers", 0, minimum=0)
    if len(set(types[: config.num_layers - num_shared])) < len(set(types)):
        raise fields.error("num_kv_shared_layers", "fewer: one layer of each type must have keys")
    layers = layers_of_types(config, types, block=Gemma4Block, scale=1.0)
    bias = fields.flag("attention_bias", False)
    return ModelSpec(
        config=config,
        layers=tuple(
            _layer(config, types, index, layer, config.num_layers - num_shared)
            for index, layer in enumerate(layers)
        ),
        qkv_bias=bias,
        o_bias=bias,
        attention=(SHARED,) if num_shared else (),
        moe=experts_beside(config),
        decoder=Gemma4Decoder,
    )


def _layer(
    config: ModelConfig, types: tuple[str, ...], index: int, layer: LayerSpec, num_own: int
) -> LayerSpec:
    """num_own: layers with keys of their own, which come first."""
    fields, kind = config.fields, types[index]
    head_dim, num_kv_heads = layer.head_dim, layer.num_kv_heads
    if kind == FULL:
        head_dim = fields.integer("global_head_dim", 512)
        if fields.flag("attention_k_eq_v", False):
            num_kv_heads = fields.integer("num_global_key_value_heads", num_kv_heads)
    each = fields.values.get("per_layer_config") or {}  # from transformers 5.23 on
    own = each.get(str(index)) if isinstance(each, dict) else each
    if own is not None:
        if not isinstance(own, dict):
            raise fields.error("per_layer_config", "an object of objects, by the layer's number")
        sizes = Fields(own, f"{fields.where}: per_layer_config.{index}")
        head_dim = sizes.integer("head_dim", layer.head_dim)
        num_kv_heads = sizes.integer("num_key_value_heads", layer.num_kv_heads)
    shares = None
    if index >= num_own:
        shares = max(i for i in range(num_own) if types[i] == kind)
    rope = rotary_config(fields, head_dim, kind)
    return replace(layer, head_dim=head_dim, num_kv_heads=num_kv_heads, rope=rope, shares=shares)


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
