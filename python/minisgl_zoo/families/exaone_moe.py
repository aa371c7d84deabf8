"""K-EXAONE: EXAONE 4's attention, after a norm; all but the first layers have a mixture, whose
router has sigmoids and a correction, and an expert that every token takes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from minisgl.layers.moe import UngatedExpert
from minisgl.models.blocks.decoder import Block
from minisgl.models.blocks.mixture import MoeSpec, names_in_mlp, read_experts
from minisgl.models.spec import Family, ModelSpec
from minisgl_zoo.blocks.layer_types import sparse_layers
from minisgl_zoo.blocks.routers import SigmoidExperts
from minisgl_zoo.families import exaone4
from minisgl_zoo.families.minimax_m2 import CORRECTION

if TYPE_CHECKING:
    from minisgl.models.config import ModelConfig


def spec(config: ModelConfig) -> ModelSpec:
    fields = config.fields
    num_experts, top_k = read_experts(config, "num_experts")
    num_dense = fields.integer("first_k_dense_replace", minimum=0)
    inner_size = fields.integer("moe_intermediate_size")
    return ModelSpec(
        config=config,
        layers=exaone4.exaone_layers(config, Block),
        qk_norm=True,
        moe=MoeSpec(
            num_experts=num_experts,
            top_k=top_k,
            inner_size=inner_size,
            renormalise=fields.flag("norm_topk_prob", True),
            is_sparse=sparse_layers(config, num_dense),
            names=names_in_mlp,
            layer=partial(SigmoidExperts, config=config),
            shared=UngatedExpert,
            shared_size=inner_size * fields.integer("num_shared_experts", minimum=0),
        ),
    )


FAMILY = Family(
    architectures=("ExaoneMoeForCausalLM",),
    spec=spec,
    names={f".mlp.{CORRECTION}": f".mlp.gate.{CORRECTION}"},
    defaults={
        **exaone4.FAMILY.defaults,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1024,
        "first_k_dense_replace": 1,
        "num_shared_experts": 1,
        "routed_scaling_factor": 2.5,
    },
)
