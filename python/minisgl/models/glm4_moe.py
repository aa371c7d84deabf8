"""GLM-4.5, GLM-4.6 and GLM-4.7: a sigmoid router, with a correction for the choice alone, beside an
expert that every token takes; dense layers first."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.layers.moe import ExpertNames, MoELayer, UngatedExpert
from minisgl.models.mixture import MoeSpec, read_experts
from minisgl.models.qwen_mixture import expert_names
from minisgl.models.spec import Family, ModelSpec, layers_of
from minisgl.quantization import Part

if TYPE_CHECKING:
    from minisgl.layers import BuildContext
    from minisgl.models.config import ModelConfig
    from minisgl.models.view import CheckpointView


class SigmoidExperts(MoELayer):
    """Weights are sigmoids of the logits; the choice is of those plus a correction. Of groups of
    experts, those count whose two best sum up to most."""

    correction: Tensor
    sum_eps = 1e-20

    def __init__(
        self,
        build: BuildContext,
        *args: Any,
        config: ModelConfig,
        names: ExpertNames,
        **options: Any,
    ) -> None:
        super().__init__(build, *args, names=names, **options)
        name = names.router.replace(".weight", ".e_score_correction_bias")
        self.declare("correction", torch.float32, Part.whole(name, options["num_experts"]))
        fields = config.fields
        self._factor = fields.number("routed_scaling_factor", 1.0)
        self._groups, self._kept = fields.integer("n_group", 1), fields.integer("topk_group", 1)

    def mix(self, x_TD: Tensor) -> Tensor:
        scores_TE = F.linear(x_TD.float(), self.router.dense().float()).sigmoid()
        choice_TE = scores_TE + self.correction
        if self._groups > 1:
            each = choice_TE.shape[1] // self._groups
            grouped = choice_TE.view(len(x_TD), self._groups, each)
            best = grouped.topk(2, dim=-1).values.sum(-1).topk(self._kept, dim=-1).indices
            is_out = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(1, best, False)
            choice_TE = grouped.masked_fill(is_out[..., None], -torch.inf).flatten(1)
        ids_TK = choice_TE.topk(self._top_k, dim=-1).indices
        weights_TK = scores_TE.gather(1, ids_TK)
        if self._renormalise:
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + self.sum_eps)
        return self.compute(x_TD, weights_TK * self._factor, ids_TK.int())

    def compute(self, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
        """See `BaseMoeBackend.routed`."""
        return self._backend.routed(x_TD, weights_TK, ids_TK, self.experts)


def spec(config: ModelConfig) -> ModelSpec:
    fields = config.fields
    num_experts, top_k = read_experts(config, "n_routed_experts")
    num_dense = fields.integer("first_k_dense_replace", 1, minimum=0)
    inner_size = fields.integer("moe_intermediate_size", 1408)
    return ModelSpec(
        config=config,
        layers=layers_of(config),
        qkv_bias=fields.flag("attention_bias", False),
        qk_norm=fields.flag("use_qk_norm", False),
        moe=MoeSpec(
            num_experts=num_experts,
            top_k=top_k,
            inner_size=inner_size,
            renormalise=fields.flag("norm_topk_prob", True),
            is_sparse=tuple(index >= num_dense for index in range(config.num_layers)),
            names=expert_names,
            layer=partial(SigmoidExperts, config=config),
            shared=UngatedExpert,
            shared_size=inner_size * fields.integer("n_shared_experts", 1, minimum=0),
        ),
    )


def _without_drafts(view: CheckpointView, config: ModelConfig) -> CheckpointView:
    """Released files have layers after the last that draft several tokens."""
    for index in range(config.fields.integer("num_nextn_predict_layers", 1, minimum=0)):
        view.drop(f"model.layers.{config.num_layers + index}.")
    return view


FAMILY = Family(
    architectures=("Glm4MoeForCausalLM",),
    spec=spec,
    view=_without_drafts,
    defaults={
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 8,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
    },
)
