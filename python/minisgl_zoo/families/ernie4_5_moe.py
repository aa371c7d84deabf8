"""ERNIE 4.5 (mixtures): ERNIE 4.5 with a mixture in most layers, whose router has softmax and a
correction, and experts that every token takes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from minisgl.layers.moe import UngatedExpert
from minisgl.models.blocks.mixture import MoeSpec, names_in_mlp, read_experts
from minisgl_zoo.blocks.routers import SigmoidExperts
from minisgl_zoo.blocks.views import interleaved_heads
from minisgl_zoo.families import ernie4_5

if TYPE_CHECKING:
    from torch import Tensor

    from minisgl.models.config import ModelConfig
    from minisgl.models.spec import ModelSpec
    from minisgl_zoo.view import CheckpointView


class ErnieExperts(SigmoidExperts):
    """An expert's weight is its probability."""

    sum_eps = 1e-12
    correction_rows = (1,)

    def weights(self, logits_TE: Tensor) -> Tensor:
        return logits_TE.softmax(-1)


def spec(config: ModelConfig) -> ModelSpec:
    fields, count = config.fields, config.num_layers
    num_experts, top_k = read_experts(config, "num_experts")
    inner_size = fields.integer("moe_intermediate_size")
    first = fields.integer("moe_layer_start_index", minimum=0)
    last = fields.integer("moe_layer_end_index", minimum=-1)
    every = fields.integer("moe_layer_interval")
    if fields.number("moe_norm_min", 1e-12) > 1e-6:
        raise fields.error("moe_norm_min", "at most 0.000001, which bounds no sum of weights")
    if fields.flag("use_bias", False):
        raise fields.error("use_bias", "false: mixtures of ERNIE 4.5 with biases are not served")
    last = count - 1 if last == -1 else last
    mixture = MoeSpec(
        num_experts=num_experts,
        top_k=top_k,
        inner_size=inner_size,
        renormalise=True,
        is_sparse=tuple(first <= i <= last and (i + 1) % every == 0 for i in range(count)),
        names=names_in_mlp,
        layer=partial(ErnieExperts, config=config),
        shared=UngatedExpert,
        shared_size=inner_size * fields.integer("moe_num_shared_experts", minimum=0),
    )
    return replace(ernie4_5.spec(config), moe=mixture)


def _view(view: CheckpointView, config: ModelConfig) -> CheckpointView:
    view.drop("model.mtp_")  # multi-token prediction
    return interleaved_heads(view, config)


FAMILY = replace(
    ernie4_5.FAMILY,
    architectures=("Ernie4_5_MoeForCausalLM",),
    spec=spec,
    view=_view,
    renames={"moe_num_experts": "num_experts", "moe_k": "num_experts_per_tok"},
    names={".mlp.moe_statics.": ".mlp.gate.", ".mlp.gate.moe_statics.": ".mlp.gate."},
    defaults={
        "num_key_value_heads": 4,
        "intermediate_size": 12_288,
        "num_experts": 64,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1536,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
        "max_position_embeddings": 131_072,
    },
)
