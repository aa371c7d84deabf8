"""What a mixture-of-experts layer asks of its backend, and the plain-torch specification of it.

Axes: T tokens, E experts, L those of them that this rank holds, K experts of a token, D hidden
size, F intermediate size of an expert (this rank's share), G = 2F, gate then up.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from minisgl.kernel.ops import Ops


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """gate_up [L, 2F, D] and down [L, D, F], contiguous: experts `first` to `first` + L of `total`.

    top_k, renormalise: see `Ops.route`. The activation is SiLU.
    """

    gate_up_LGD: Tensor
    down_LDF: Tensor
    first: int
    total: int
    top_k: int
    renormalise: bool


class BaseMoeBackend(ABC):
    """Computes `sum over k of weight[t, k] * expert[id[t, k]](x[t])`; no token is dropped."""

    def __init__(self, ops: Ops) -> None:
        self.ops = ops

    def forward(self, x_TD: Tensor, logits_TE: Tensor, experts: Experts) -> Tensor:
        """Route by the logits; [T, D], of the experts that this rank holds.

        x is contiguous and has the weights' dtype. The products of an expert are rounded to it as
        a linear layer's are; the sum over experts is float32 until its end.
        """
        weights_TK, ids_TK = self.ops.route(logits_TE, experts.top_k, experts.renormalise)
        return self.routed(x_TD, weights_TK, ids_TK, experts)

    @abstractmethod
    def routed(self, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, experts: Experts) -> Tensor:
        """`forward` for weights (float32) and ids (int32, in [0, E), different for one token)."""


class TorchMoeBackend(BaseMoeBackend):
    """A loop over experts: the specification, and the fallback where nothing compiles."""

    def routed(self, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, experts: Experts) -> Tensor:
        out_TD = torch.zeros(x_TD.shape, dtype=torch.float32, device=x_TD.device)
        for index in range(len(experts.down_LDF)):
            tokens, slots = torch.where(ids_TK == experts.first + index)
            if len(tokens):
                gate_up = self.ops.linear(x_TD[tokens], experts.gate_up_LGD[index])
                down = self.ops.linear(self.ops.silu_and_mul(gate_up), experts.down_LDF[index])
                out_TD.index_add_(0, tokens, down.float() * weights_TK[tokens, slots, None])
        return out_TD.to(x_TD.dtype)
