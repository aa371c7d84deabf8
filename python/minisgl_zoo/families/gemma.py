"""Gemma 1 to 4 (text): a scaled embedding; from Gemma 2 on norms before and after attention and
MLP, and windows in most layers.

`defaults` are the values of each family's config class in transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from minisgl.attention.base import KV_SHARING, SOFTCAP
from minisgl.models.blocks.decoder import Attention, LayerBuild
from minisgl.models.config import Fields, ModelConfig
from minisgl.models.families.dense import FULL, SLIDING, plain
from minisgl.models.loading.rotation import rotary_config
from minisgl.models.spec import Family, LayerSpec, ModelSpec, layers_of
from minisgl_zoo.blocks.encoder import both_ways
from minisgl_zoo.blocks.gemma import GemmaBlock, GemmaDecoder, GemmaNorm
from minisgl_zoo.blocks.gemma4 import Gemma4Block, Gemma4Decoder, experts_beside
from minisgl_zoo.blocks.layer_kinds import layer_types, layers_of_types, refuse, sliding_rope
from minisgl_zoo.blocks.sandwich import SandwichBlock


class CappedAttention(Attention):
    def __init__(self, at: LayerBuild) -> None:
        super().__init__(at)
        softcap = at.spec.config.fields.optional_number("attn_logit_softcapping")
        self.attend.layer = replace(self.attend.layer, softcap=softcap)


class Gemma2Block(SandwichBlock):
    attention_type = CappedAttention
    rms_norm_type = GemmaNorm


class Gemma3Attention(Attention):
    head_norm_type = GemmaNorm

    def __init__(self, at: LayerBuild) -> None:
        super().__init__(at)
        self.attend.layer = replace(self.attend.layer, two_way=True)


class Gemma3Block(SandwichBlock):
    attention_type = Gemma3Attention
    rms_norm_type = GemmaNorm


_TWO_WAY: Final = "use_bidirectional_attention"


def gemma(config: ModelConfig) -> ModelSpec:
    refuse(config.fields, _TWO_WAY, "a decoder is causal")
    layers = partial(layers_of, block=GemmaBlock)
    return plain(config, layers=layers, decoder=GemmaDecoder)


def gemma2(config: ModelConfig) -> ModelSpec:
    """Windows in every other layer, softcaps on attention scores and on logits."""
    fields = config.fields
    refuse(fields, _TWO_WAY, "a decoder is causal")
    is_capped = fields.optional_number("attn_logit_softcapping") is not None
    return plain(
        config,
        layers=partial(
            layers_of_types,
            types=layer_types(config, period=2),
            block=Gemma2Block,
            scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
        ),
        attention=(SOFTCAP,) if is_capped else (),
        decoder=partial(GemmaDecoder, softcap=fields.optional_number("final_logit_softcapping")),
    )


def gemma3(config: ModelConfig) -> ModelSpec:
    """Five of six layers have a window and their own rotation. The model without an LM head embeds,
    and attends in both directions (EmbeddingGemma)."""
    fields = config.fields
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if fields.values.get(name) is not None:
            raise fields.error(name, "null: Gemma 3 was released without")
    is_encoder = not config.architecture.endswith("ForCausalLM")
    if fields.flag(_TWO_WAY, False) != is_encoder:
        raise fields.error(_TWO_WAY, "true for Gemma3TextModel, which embeds, and false for others")
    spec = plain(
        config,
        layers=partial(
            layers_of_types,
            types=layer_types(config, period=fields.integer("sliding_window_pattern", 6)),
            ropes={SLIDING: sliding_rope(config, fields.number("rope_local_base_freq", 10_000.0))},
            block=Gemma3Block,
            scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
        ),
        qk_norm=True,
        decoder=GemmaDecoder,
    )
    return both_ways(spec) if is_encoder else spec


def gemma4(config: ModelConfig) -> ModelSpec:
    """Layers without a window have wide heads; keys may serve as values, and layers may share them;
    each layer may have its own embedding; a mixture may run beside the MLP."""
    fields = config.fields
    if fields.values.get(_TWO_WAY) == "all":
        raise fields.error(_TWO_WAY, "null: a decoder is causal")
    types = (*layer_types(config, period=6)[:-1], FULL)  # the last is full, whatever the file says
    num_shared = fields.integer("num_kv_shared_layers", 0, minimum=0)
    num_own = max(config.num_layers - num_shared, 0)
    if len(set(types[:num_own])) < len(set(types)):
        raise fields.error("num_kv_shared_layers", "fewer: one layer of each type must have keys")
    return plain(
        config,
        layers=partial(gemma4_layers, types=types, num_own=num_own),
        moe=experts_beside,
        attention=(KV_SHARING,) if num_shared else (),
        decoder=Gemma4Decoder,
    )


def gemma4_layers(config: ModelConfig, types: Sequence[str], num_own: int) -> tuple[LayerSpec, ...]:
    """Return the layers of these types. The first `num_own` have keys and values of their own. A
    later one reads those of the last of these layers that has its type. Raises ConfigError."""
    layers = layers_of_types(config, types, block=Gemma4Block, scale=1.0)
    return tuple(_layer(config, types, index, layer, num_own) for index, layer in enumerate(layers))


def _layer(
    config: ModelConfig, types: Sequence[str], index: int, layer: LayerSpec, num_own: int
) -> LayerSpec:
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


GEMMA = Family(
    spec=gemma,
    defaults={
        "hidden_act": "gelu_pytorch_tanh",
        "num_key_value_heads": 16,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    activations={"gelu": "gelu_tanh"},  # most released files write gelu, as Hugging Face notes, too
)
GEMMA2 = Family(
    spec=gemma2,
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
GEMMA3 = Family(
    spec=gemma3,
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
GEMMA4 = Family(
    spec=gemma4,
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
GEMMA4UNIFIED = replace(
    GEMMA4,
    defaults={
        **GEMMA4.defaults,
        "max_position_embeddings": 262_144,
        "sliding_window": 1024,
        "hidden_size_per_layer_input": 0,
        "use_bidirectional_attention": "vision",
    },
)
