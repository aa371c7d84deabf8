"""Falcon-H1: Mamba2 and attention side by side after one norm, with constant factors everywhere."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from minisgl.models.spec import Family, ModelSpec, layers_of
from minisgl_zoo.blocks.falcon_h1_view import scaled_tensors
from minisgl_zoo.blocks.mamba2 import as_mamba
from minisgl_zoo.blocks.scaled import ScaledDecoder
from minisgl_zoo.blocks.side_block import SideBlock, SidePlace

if TYPE_CHECKING:
    from minisgl.models.config import ModelConfig


def spec(config: ModelConfig) -> ModelSpec:
    fields = config.fields
    norm = "before" if fields.flag("mamba_norm_before_gate", True) else "after"
    mamba = {
        "norm": norm if fields.flag("mamba_rms_norm", False) else None,
        "out_bias": fields.flag("projectors_bias", False),
    }
    pairs = [
        (as_mamba(config, layer, SidePlace, **mamba), replace(layer, block=SideBlock))
        for layer in layers_of(config)
    ]
    bias = fields.flag("attention_bias", False)
    return ModelSpec(
        config=config,
        layers=tuple(layer for pair in pairs for layer in pair),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
        decoder=partial(
            ScaledDecoder,
            embedding_scale=fields.number("embedding_multiplier", 1.0),
            logit_scale=fields.number("lm_head_multiplier", 1.0),
        ),
    )


NAMES = {
    "model.final_layernorm.": "model.norm.",
    ".pre_ff_layernorm.": ".post_attention_layernorm.",
    ".feed_forward.": ".mlp.",
    ".mamba.norm.": ".mamba.gated_norm.",
}


FAMILY = Family(
    architectures=("FalconH1ForCausalLM",),
    spec=spec,
    names=NAMES,
    view=scaled_tensors,
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "mamba_d_ssm": 1024,
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
    },
)
