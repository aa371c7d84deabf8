"""Gemma 3 (text): norms before and after attention and MLP, windows in five of six layers, which
have a rotation of their own."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from minisgl.layers import AttentionLayer
from minisgl.models.gemma import GemmaNorm
from minisgl.models.layer_types import SLIDING, layer_types, layers_of_types
from minisgl.models.post_norm import SandwichBlock
from minisgl.models.rotation import sliding_rope
from minisgl.models.scaled import ScaledDecoder
from minisgl.models.spec import Family, ModelSpec

if TYPE_CHECKING:
    from minisgl.models.config import ModelConfig
    from minisgl.models.decoder import LayerBuild


class Gemma3Block(SandwichBlock):
    rms_norm_type = GemmaNorm

    def __init__(self, at: LayerBuild) -> None:
        super().__init__(at)
        self.attention.attend = AttentionLayer(
            self.attention.attend.layer,
            rope=at.rope,
            q_norm=at.head_norm(GemmaNorm, "q_norm"),
            k_norm=at.head_norm(GemmaNorm, "k_norm"),
        )


def spec(config: ModelConfig) -> ModelSpec:
    fields = config.fields
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if fields.values.get(name) is not None:
            raise fields.error(name, "null: Gemma 3 was released without")
    if fields.flag("use_bidirectional_attention", False):
        raise fields.error("use_bidirectional_attention", "false: a decoder attends causally")
    types = layer_types(config, period=fields.integer("sliding_window_pattern", 6))
    near = sliding_rope(config, fields.number("rope_local_base_freq", 10_000.0))
    bias = fields.flag("attention_bias", False)
    return ModelSpec(
        config=config,
        layers=layers_of_types(
            config,
            types,
            ropes=[near if kind == SLIDING else config.rope for kind in types],
            block=Gemma3Block,
            scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
        ),
        qkv_bias=bias,
        o_bias=bias,
        decoder=partial(ScaledDecoder, embedding_scale=config.hidden_size**0.5),
    )


FAMILY = Family(
    architectures=("Gemma3ForCausalLM",),
    spec=spec,
    # The released files of the larger sizes leave out what is so here.
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
