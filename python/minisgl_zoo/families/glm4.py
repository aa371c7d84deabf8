"""GLM-4-0414: the attention of GLM-4-9B, and norms before and after attention and MLP."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from minisgl_zoo.blocks.sandwich import SandwichBlock
from minisgl_zoo.families import glm


class Glm4Block(SandwichBlock):
    norm_names = (
        "input_layernorm",
        "post_self_attn_layernorm",
        "post_attention_layernorm",
        "post_mlp_layernorm",
    )


FAMILY = replace(
    glm.FAMILY, architectures=("Glm4ForCausalLM",), spec=partial(glm.spec, block=Glm4Block)
)
