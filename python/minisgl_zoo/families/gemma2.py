"""Gemma 2: norms before and after attention and MLP, windows in every other layer, softcaps on
attention scores and on logits."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from minisgl.attention.base import SOFTCAP
from minisgl.models.blocks.decoder import Attention
from minisgl.models.spec import Family, ModelSpec
from minisgl_zoo.blocks.layer_types import layer_types, layers_of_types
from minisgl_zoo.blocks.sandwich import SandwichBlock
from minisgl_zoo.families.gemma import GemmaDecoder, GemmaNorm, check_causal

if TYPE_CHECKING:
    from minisgl.models.blocks.decoder import LayerBuild
    from minisgl.models.config import ModelConfig


class CappedAttention(Attention):
    def __init__(self, at: LayerBuild) -> None:
        super().__init__(at)
        softcap = at.spec.config.fields.optional_number("attn_logit_softcapping")
        self.attend.layer = replace(self.attend.layer, softcap=softcap)


class Gemma2Block(SandwichBlock):
    attention_type = CappedAttention
    rms_norm_type = GemmaNorm


def spec(config: ModelConfig) -> ModelSpec:
    fields = config.fields
    check_causal(fields)
    bias = fields.flag("attention_bias", False)
    is_capped = fields.optional_number("attn_logit_softcapping") is not None
    return ModelSpec(
        config=config,
        layers=layers_of_types(
            config,
            layer_types(config, period=2),
            block=Gemma2Block,
            scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
        ),
        qkv_bias=bias,
        o_bias=bias,
        attention=(SOFTCAP,) if is_capped else (),
        decoder=partial(GemmaDecoder, softcap=fields.optional_number("final_logit_softcapping")),
    )


FAMILY = Family(
    architectures=("Gemma2ForCausalLM",),
    spec=spec,
    defaults={
        "hidden_act": "gelu_pytorch_tanh",
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    renames={"hidden_activation": "hidden_act"},
)
