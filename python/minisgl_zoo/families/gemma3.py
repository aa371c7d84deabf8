"""Gemma 3 (text): norms before and after attention and MLP; five of six layers have a window and
their own rotation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minisgl.models.blocks.decoder import Attention
from minisgl.models.families.layer_types import SLIDING
from minisgl.models.spec import Family, ModelSpec
from minisgl_zoo.blocks.layer_types import layer_types, layers_of_types
from minisgl_zoo.blocks.rotation import sliding_rope
from minisgl_zoo.blocks.sandwich import SandwichBlock
from minisgl_zoo.families.gemma import GemmaDecoder, GemmaNorm, check_causal

if TYPE_CHECKING:
    from minisgl.models.config import ModelConfig


class Gemma3Attention(Attention):
    head_norm_type = GemmaNorm


class Gemma3Block(SandwichBlock):
    attention_type = Gemma3Attention
    rms_norm_type = GemmaNorm


def spec(config: ModelConfig) -> ModelSpec:
    fields = config.fields
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if fields.values.get(name) is not None:
            raise fields.error(name, "null: Gemma 3 was released without")
    check_causal(fields)
    types = layer_types(config, period=fields.integer("sliding_window_pattern", 6))
    windowed = sliding_rope(config, fields.number("rope_local_base_freq", 10_000.0))
    bias = fields.flag("attention_bias", False)
    return ModelSpec(
        config=config,
        layers=layers_of_types(
            config,
            types,
            ropes=[windowed if kind == SLIDING else config.rope for kind in types],
            block=Gemma3Block,
            scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
        ),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        decoder=GemmaDecoder,
    )


FAMILY = Family(
    architectures=("Gemma3ForCausalLM",),
    spec=spec,
    # The released files of the larger sizes leave out fields with these values.
    defaults={
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
        "rope_theta": 1e6,
        "sliding_window": 4096,
    },
    renames={"hidden_activation": "hidden_act"},
    layer_ropes=True,
)
