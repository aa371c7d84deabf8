"""ERNIE 4.5 (mixtures): ERNIE 4.5 with a mixture in most layers, whose router has softmax and a
correction, and experts that every token takes."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from minisgl.models.config import ModelConfig
from minisgl.models.spec import Family, ModelSpec, layers_of
from minisgl_zoo.blocks.layer_kinds import refuse
from minisgl_zoo.blocks.routers import SigmoidExperts, sigmoid_mixture
from minisgl_zoo.blocks.views import interleaved_heads
from minisgl_zoo.view import CheckpointView


class ErnieExperts(SigmoidExperts):
    """An expert's weight is its probability."""

    sum_eps = 1e-12
    correction_rows = (1,)

    def weights(self, logits_TE: Tensor) -> Tensor:
        return logits_TE.softmax(-1)


def spec(config: ModelConfig) -> ModelSpec:
    fields, count = config.fields, config.num_layers
    mixture = sigmoid_mixture(
        config, experts="num_experts", shared="moe_num_shared_experts", layer=ErnieExperts
    )
    first = fields.integer("moe_layer_start_index", minimum=0)
    last = fields.integer("moe_layer_end_index", minimum=-1)
    every = fields.integer("moe_layer_interval")
    if fields.number("moe_norm_min", 1e-12) > 1e-6:
        raise fields.error("moe_norm_min", "at most 0.000001, which bounds no sum of weights")
    refuse(fields, "use_bias", "mixtures of ERNIE 4.5 with biases are not served")
    last = count - 1 if last == -1 else last
    is_sparse = tuple(first <= i <= last and (i + 1) % every == 0 for i in range(count))
    mixture = replace(mixture, is_sparse=is_sparse, renormalise=True)
    return ModelSpec(config=config, layers=layers_of(config), moe=mixture)


def _view(view: CheckpointView, config: ModelConfig) -> CheckpointView:
    view.drop("model.mtp_")  # multi-token prediction
    return interleaved_heads(view, config)


ERNIE4_5_MOE = Family(
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
