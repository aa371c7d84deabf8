"""LFM3: gated short convolutions, attention within a window and attention to all take turns; each
head's output has a gate; norms before and after both halves of a block."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minisgl.models.blocks.decoder import Attention, Block
from minisgl.models.families.layer_types import FULL, SLIDING, types_in_config
from minisgl.models.spec import Family, ModelSpec
from minisgl_zoo.blocks.gated_attention import GatedAttention
from minisgl_zoo.blocks.layer_types import layers_of_types
from minisgl_zoo.blocks.rotation import sliding_rope
from minisgl_zoo.blocks.sandwich import SandwichBlock
from minisgl_zoo.blocks.short_conv import CONV, ConvBlock, with_convs
from minisgl_zoo.families import lfm2

if TYPE_CHECKING:
    from minisgl.models.blocks.decoder import LayerBuild
    from minisgl.models.config import ModelConfig
    from minisgl_zoo.blocks.short_conv import ShortConv


class HeadGatedAttention(GatedAttention):
    gate_name, gate_size = "gate_proj", 1


def _mixer(at: LayerBuild) -> Attention | ShortConv:
    """Return what a block has in the place of attention."""
    if at.layer.recurrent:
        return ConvBlock.attention_type(at)
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


def spec(config: ModelConfig) -> ModelSpec:
    fields = config.fields
    if fields.flag("attention_bias", False):
        raise fields.error("attention_bias", "false: biases of attention are not supported")
    types = types_in_config(config, (FULL, SLIDING, CONV)) or tuple(
        _kind(index) for index in range(config.num_layers)
    )
    windowed = sliding_rope(config, 10_000.0)
    block = Lfm3Block if fields.flag("use_sandwich_norm", True) else PreNormBlock
    layers = layers_of_types(
        config,
        types,
        ropes=[windowed if kind == SLIDING else config.rope for kind in types],
        block=block,
    )
    return ModelSpec(config=config, layers=with_convs(config, layers, types, block), qk_norm=True)


def _kind(index: int) -> str:
    """Return the type of a layer if config.json has no `layer_types`."""
    if index % 4 == 2:
        return FULL
    return CONV if index % 4 or not index else SLIDING


FAMILY = Family(
    architectures=("Lfm3ForCausalLM",),
    spec=spec,
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
    names={**lfm2.NAMES, ".self_attn.g_proj.": ".self_attn.gate_proj."},
    layer_ropes=True,
)
