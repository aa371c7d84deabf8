"""Hunyuan-A13B: Hunyuan with a mixture in each layer, and an expert that every token takes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from minisgl.layers.moe import UngatedExpert
from minisgl.models.blocks.mixture import mixture_in_each_layer, names_in_mlp
from minisgl.models.config import Fields
from minisgl_zoo.families import hunyuan

if TYPE_CHECKING:
    from minisgl.models.config import ModelConfig
    from minisgl.models.spec import ModelSpec

TOP_K = "num_experts_per_tok"


class HunyuanExpert(UngatedExpert):
    module = "shared_mlp"


def spec(config: ModelConfig) -> ModelSpec:
    """`moe_topk` may be a list with a number for each layer, which must be the same here."""
    fields, each = config.fields, config.fields.values[TOP_K]
    if type(each) is list:
        if len(each) != config.num_layers or each != each[:1] * config.num_layers:
            raise fields.error(TOP_K, f"the same number for each of {config.num_layers} layers")
        config = replace(config, fields=Fields({**fields.values, TOP_K: each[0]}, fields.where))
    mixture = mixture_in_each_layer(
        config, names_in_mlp, shared=HunyuanExpert, shared_size=config.intermediate_size
    )
    return replace(hunyuan.spec(config), moe=mixture)


FAMILY = replace(
    hunyuan.FAMILY,
    architectures=("HunYuanMoEV1ForCausalLM",),
    spec=spec,
    names={".mlp.gate.wg.": ".mlp.gate."},
    renames={"num_experts": "num_local_experts", "moe_topk": TOP_K},
    defaults={**hunyuan.FAMILY.defaults, "num_local_experts": 1, TOP_K: 1},
)
