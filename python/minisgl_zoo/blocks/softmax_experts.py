"""A router of softmax whose experts are in groups; a token takes its experts from the best groups.

Axes: T tokens, D hidden size, E experts, K experts of a token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor

from minisgl.layers.moe import MoELayer
from minisgl_zoo.blocks.sigmoid_experts import in_best_groups, read_groups

if TYPE_CHECKING:
    from minisgl.layers import BuildContext
    from minisgl.models.config import ModelConfig


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
