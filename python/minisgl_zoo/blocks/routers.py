"""Routers whose experts are in groups: a token takes its experts from the best groups. A router of
sigmoids has a correction, which counts only when experts are chosen.

Axes: T tokens, D hidden size, E experts, K experts of a token.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.layers import BuildContext
from minisgl.layers.moe import ExpertNames, MoELayer, SharedExpert
from minisgl.models.blocks.mixture import MoeSpec, names_in_mlp, read_experts
from minisgl.models.config import Fields, ModelConfig
from minisgl.quantization import Part
from minisgl_zoo.blocks.layer_kinds import sparse_layers

CORRECTION = "e_score_correction_bias"


class UngatedExpert(SharedExpert):
    """An MLP for every token, without a gate."""

    module = "shared_experts"

    def _declare_gate(self, build: BuildContext, name: str, hidden_size: int) -> None:
        pass


def read_groups(fields: Fields, num_experts: int, top_k: int) -> tuple[int, int]:
    """Return the number of groups of experts, and of those from which a token takes its experts.

    Raises ConfigError if the groups are not equal, or a token could not take `top_k` experts.
    """
    groups, kept = fields.integer("n_group", 1), fields.integer("topk_group", 1)
    if groups == 1:
        return 1, 1
    size = num_experts // groups
    if num_experts % groups or size < 2:
        expected = f"1, or a divisor of {num_experts} experts with 2 or more in each group"
        raise fields.error("n_group", expected)
    if not top_k <= kept * size <= num_experts:
        least = -(-top_k // size)
        expected = f"from {least} to {groups}, as a token takes {top_k} experts"
        raise fields.error("topk_group", expected)
    return groups, kept


def in_best_groups(scores_TE: Tensor, groups: int, kept: int, *, best: int) -> Tensor:
    """Return the scores, with -inf for experts outside the `kept` best groups. A group is as good
    as the sum of its `best` highest scores."""
    if groups == 1:
        return scores_TE
    # A step that samples nothing has no tokens in its last layer, for which -1 is no size.
    grouped = scores_TE.view(len(scores_TE), groups, scores_TE.shape[1] // groups)
    chosen = grouped.topk(best, dim=-1).values.sum(-1).topk(kept, dim=-1).indices
    is_out = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(1, chosen, False)
    return grouped.masked_fill(is_out[..., None], -torch.inf).flatten(1)


class SigmoidExperts(MoELayer):
    """An expert's weight is the sigmoid of its logit, and its score is the weight plus a
    correction. A token takes the experts with the highest scores in the best groups
    (`in_best_groups`).

    sum_eps: added to the sum by which the weights are divided. correction_rows: the axes of the
    stored correction before that of the experts.
    """

    correction: Tensor
    sum_eps = 1e-20
    correction_rows: tuple[int, ...] = ()

    def __init__(
        self,
        build: BuildContext,
        *args: Any,
        config: ModelConfig,
        names: ExpertNames,
        **options: Any,
    ) -> None:
        super().__init__(build, *args, names=names, **options)
        name = names.router.replace(".weight", f".{CORRECTION}")
        part = Part.whole(name, *self.correction_rows, options["num_experts"])
        self.declare("correction", torch.float32, part)
        self._factor = config.fields.number("routed_scaling_factor", 1.0)
        self._groups, self._kept = read_groups(config.fields, options["num_experts"], self._top_k)

    def weights(self, logits_TE: Tensor) -> Tensor:
        return logits_TE.sigmoid()

    def mix(self, x_TD: Tensor) -> Tensor:
        scores_TE = self.weights(F.linear(x_TD.float(), self.router.dense().float()))
        choice_TE = in_best_groups(scores_TE + self.correction, self._groups, self._kept, best=2)
        ids_TK = choice_TE.topk(self._top_k, dim=-1).indices
        weights_TK = scores_TE.gather(1, ids_TK)
        if self._renormalise:
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + self.sum_eps)
        return self.compute(x_TD, weights_TK * self._factor, ids_TK.int())

    def compute(self, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
        """See `BaseMoeBackend.routed`."""
        return self._backend.routed(x_TD, weights_TK, ids_TK, self.experts)


def sigmoid_mixture(
    config: ModelConfig,
    *,
    experts: str = "n_routed_experts",
    dense: str = "first_k_dense_replace",
    shared: str | None = "n_shared_experts",
    layer: type[SigmoidExperts] = SigmoidExperts,
) -> MoeSpec:
    """Return the mixture of all layers but the first ones. experts, dense, shared: config.json's
    names of the numbers of experts, of the first layers, and of the experts that every token takes.
    Raises ConfigError."""
    fields = config.fields
    num_experts, top_k = read_experts(config, experts)
    inner_size = fields.integer("moe_intermediate_size", 1408)
    num_shared = fields.integer(shared, 1, minimum=0) if shared else 0
    return MoeSpec(
        num_experts=num_experts,
        top_k=top_k,
        inner_size=inner_size,
        renormalise=fields.flag("norm_topk_prob", True),
        is_sparse=sparse_layers(config, fields.integer(dense, 1, minimum=0)),
        names=names_in_mlp,
        layer=partial(layer, config=config),
        shared=UngatedExpert,
        shared_size=inner_size * num_shared,
    )


class SoftmaxExperts(MoELayer):
    """An expert's score and weight are its probability.

    best: a group is as good as the sum of its `best` highest scores; None if groups do not count.
    """

    def __init__(
        self,
        build: BuildContext,
        *args: Any,
        config: ModelConfig,
        best: int | None,
        **options: Any,
    ) -> None:
        super().__init__(build, *args, **options)
        self._factor = config.fields.number("routed_scaling_factor", 1.0)
        self._best, self._groups, self._kept = best or 1, 1, 1
        if best:
            num_experts = options["num_experts"]
            self._groups, self._kept = read_groups(config.fields, num_experts, self._top_k)

    def mix(self, x_TD: Tensor) -> Tensor:
        scores_TE = F.linear(x_TD.float(), self.router.dense().float()).softmax(-1)
        choice_TE = in_best_groups(scores_TE, self._groups, self._kept, best=self._best)
        weights_TK, ids_TK = choice_TE.topk(self._top_k, dim=-1)
        if self._renormalise:
            weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        return self._backend.routed(x_TD, weights_TK * self._factor, ids_TK.int(), self.experts)
