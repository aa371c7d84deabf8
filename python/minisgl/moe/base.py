"""The interface of the backends of a mixture of experts, and its plain-torch specification.

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
    from minisgl.quantization import Weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """gate_up [L, 2F, D] and down [L, D, F]: L = `count` experts from `first` on, of `total`.

    top_k, renormalise: see `Ops.route`. The activation is SiLU.
    """

    gate_up: Weight
    down: Weight
    count: int
    first: int
    total: int
    top_k: int
    renormalise: bool

    @property
    def gate_up_LGD(self) -> Tensor:
        """Contiguous, for kernels that read plain weights."""
        return self.gate_up.dense()

    @property
    def down_LDF(self) -> Tensor:
        return self.down.dense()


class BaseMoeBackend(ABC):
    """Computes `sum over k of weight[t, k] * expert[id[t, k]](x[t])`; no token is dropped."""

    def __init__(self, ops: Ops) -> None:
        self.ops = ops

    def forward(self, x_TD: Tensor, logits_TE: Tensor, experts: Experts) -> Tensor:
        """Route by the logits. Returns the weighted sum [T, D] of the experts of this rank.

        x is contiguous. The outputs of an expert's GEMMs are rounded to x's dtype, as a linear
        layer's are; the sum over experts is float32 until its end.
        """
        weights_TK, ids_TK = self.ops.route(logits_TE, experts.top_k, experts.renormalise)
        return self.routed(x_TD, weights_TK, ids_TK, experts)

    @abstractmethod
    def routed(self, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, experts: Experts) -> Tensor:
        """`forward` after routing: weights float32, ids int32 in [0, E), distinct for a token."""


class TorchMoeBackend(BaseMoeBackend):
    """A loop over experts: the specification, the fallback where nothing compiles, and the backend
    of weights that no kernel reads."""

    def routed(self, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, experts: Experts) -> Tensor:
        out_TD = torch.zeros(x_TD.shape, dtype=torch.float32, device=x_TD.device)
        for index in range(experts.count):
            tokens, slots = torch.where(ids_TK == experts.first + index)
            if len(tokens):
                act = experts.gate_up[index].linear(x_TD[tokens], gate="silu")
                down = experts.down[index].linear(act)
                out_TD.index_add_(0, tokens, down.float() * weights_TK[tokens, slots, None])
        return out_TD.to(x_TD.dtype)
