"""LFM2-MoE: LFM2 with a mixture in all but the first layers; its router has sigmoids and a
correction."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from minisgl.models.blocks.mixture import MoeSpec, names_in_mlp, read_experts
from minisgl.models.spec import Family, ModelSpec
from minisgl_zoo.blocks.routers import SigmoidExperts
from minisgl_zoo.blocks.short_conv import conv_layers
from minisgl_zoo.families.lfm2 import DEFAULTS, NAMES, RENAMES

if TYPE_CHECKING:
    from minisgl.models.config import ModelConfig


class Lfm2Experts(SigmoidExperts):
    sum_eps = 1e-6


def spec(config: ModelConfig) -> ModelSpec:
    fields = config.fields
    num_experts, top_k = read_experts(config, "num_experts")
    num_dense = fields.integer("num_dense_layers", 2, minimum=0)
    if not fields.flag("use_expert_bias", True):
        raise fields.error("use_expert_bias", "true: a router without a correction is not served")
    return ModelSpec(
        config=config,
        layers=conv_layers(config),
        qk_norm=True,
        moe=MoeSpec(
            num_experts=num_experts,
            top_k=top_k,
            inner_size=fields.integer("moe_intermediate_size"),
            renormalise=fields.flag("norm_topk_prob", True),
            is_sparse=tuple(index >= num_dense for index in range(config.num_layers)),
            names=names_in_mlp,
            layer=partial(Lfm2Experts, config=config),
        ),
    )


FAMILY = Family(
    architectures=("Lfm2MoeForCausalLM",),
    spec=spec,
    defaults={
        **DEFAULTS,
        "moe_intermediate_size": 1792,
        "num_experts": 32,
        "num_experts_per_tok": 4,
    },
    renames=RENAMES,
    names=NAMES,
)
