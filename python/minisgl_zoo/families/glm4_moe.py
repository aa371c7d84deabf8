"""GLM-4.5, GLM-4.6 and GLM-4.7: all but the first layers have a mixture, whose router has sigmoids
and a correction, and an expert that every token takes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from minisgl.layers.moe import UngatedExpert
from minisgl.models.blocks.mixture import MoeSpec, names_in_mlp, read_experts
from minisgl.models.spec import Family, ModelSpec, layers_of
from minisgl_zoo.blocks.layer_types import sparse_layers
from minisgl_zoo.blocks.routers import SigmoidExperts

if TYPE_CHECKING:
    from minisgl.models.config import ModelConfig
    from minisgl_zoo.view import CheckpointView


def spec(config: ModelConfig) -> ModelSpec:
    return ModelSpec(
        config=config,
        layers=layers_of(config),
        qkv_bias=config.fields.flag("attention_bias", False),
        qk_norm=config.fields.flag("use_qk_norm", False),
        moe=sigmoid_mixture(config),
    )


def sigmoid_mixture(config: ModelConfig) -> MoeSpec:
    """Return the mixture of all layers but the first ones. Raises ConfigError."""
    fields = config.fields
    num_experts, top_k = read_experts(config, "n_routed_experts")
    inner_size = fields.integer("moe_intermediate_size", 1408)
    return MoeSpec(
        num_experts=num_experts,
        top_k=top_k,
        inner_size=inner_size,
        renormalise=fields.flag("norm_topk_prob", True),
        is_sparse=sparse_layers(config, fields.integer("first_k_dense_replace", 1, minimum=0)),
        names=names_in_mlp,
        layer=partial(SigmoidExperts, config=config),
        shared=UngatedExpert,
        shared_size=inner_size * fields.integer("n_shared_experts", 1, minimum=0),
    )


def without_drafts(view: CheckpointView, config: ModelConfig) -> CheckpointView:
    """Leave out the layers of multi-token prediction, which follow the last layer."""
    for index in range(config.fields.integer("num_nextn_predict_layers", 1, minimum=0)):
        view.drop(f"model.layers.{config.num_layers + index}.")
    return view


FAMILY = Family(
    architectures=("Glm4MoeForCausalLM",),
    spec=spec,
    view=without_drafts,
    defaults={
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 8,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
    },
)
