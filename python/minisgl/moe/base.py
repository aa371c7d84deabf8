"""The interface of the backends of a mixture of experts, its plain-torch specification, and its
backend on a CPU.

Axes: T tokens, E experts, L those of them that this rank holds, K experts of a token, D hidden
size, F intermediate size of an expert (this rank's share), G = 2F, gate then up.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minisgl.kernel.cpu import CpuOps

if TYPE_CHECKING:
    from minisgl.kernel.ops import Activation, Ops
    from minisgl.quantization import Weight


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """The activation of gpt-oss: (up + 1) * gate * sigmoid(alpha * gate), where gate is at most
    `limit` and up within +-limit."""

    alpha: float
    limit: float

    def __call__(self, gate_up: Tensor) -> Tensor:
        """[..., 2F], gate then up -> [..., F]."""
        gate, up = gate_up.chunk(2, dim=-1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))


@dataclass(frozen=True, slots=True)
class SquaredRelu:
    """relu(up) ** 2, the activation of experts without a gate."""

    def __call__(self, up: Tensor) -> Tensor:
        """[..., F] -> the same shape."""
        return torch.relu(up).square()


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The experts of one layer that this rank holds: `count` experts from `first` on, of `total`.

    gate_up: [L, 2F, D]; with `SquaredRelu` [L, F, D], only up. down: [L, D, F]. top_k,
    renormalise: see `Ops.route`. gate_up_bias: [L, 2F]. down_bias: [L, D]. scale: float32 [E],
    multiplies each expert's routing weight after routing; None for 1.
    """

    gate_up: Weight
    down: Weight
    count: int
    first: int
    total: int
    top_k: int
    renormalise: bool
    activation: Activation | ClampedGate | SquaredRelu = "silu"
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    scale: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether every kernel computes these experts: SiLU, no biases."""
        return self.plain_gate == "silu"

    @property
    def plain_gate(self) -> Activation | None:
        """The activation, if the experts are gated MLPs without biases; else None."""
        if isinstance(self.activation, ClampedGate | SquaredRelu) or self.gate_up_bias is not None:
            return None
        return None if self.down_bias is not None else self.activation

    @property
    def is_squared(self) -> bool:
        return isinstance(self.activation, SquaredRelu)

    @property
    def gate_up_LGD(self) -> Tensor:
        """The weights as a plain, contiguous tensor."""
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
        if experts.scale is not None:
            weights_TK = weights_TK * experts.scale[ids_TK]
        return self.routed(x_TD, weights_TK, ids_TK, experts)

    @abstractmethod
    def routed(self, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, experts: Experts) -> Tensor:
        """`forward` after routing: weights float32, ids int32 in [0, E), distinct for a token."""


class TorchMoeBackend(BaseMoeBackend):
    """A loop over experts: the specification, the fallback if no kernel can be compiled, and the
    backend for formats that no kernel reads."""

    def routed(self, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, experts: Experts) -> Tensor:
        out_TD = torch.zeros(x_TD.shape, dtype=torch.float32, device=x_TD.device)
        for index in range(experts.count):
            tokens, slots = torch.where(ids_TK == experts.first + index)
            if len(tokens):
                down = _expert(x_TD[tokens], experts, index)
                out_TD.index_add_(0, tokens, down.float() * weights_TK[tokens, slots, None])
        return out_TD.to(x_TD.dtype)


def _expert(x_MD: Tensor, experts: Experts, index: int) -> Tensor:
    """Return the output of expert `index` of this rank for M tokens."""
    up_bias, down_bias = (
        None if bias is None else bias[index] for bias in (experts.gate_up_bias, experts.down_bias)
    )
    gate_up, activation = experts.gate_up[index], experts.activation
    if isinstance(activation, ClampedGate | SquaredRelu):
        act = activation(gate_up.linear(x_MD, up_bias))
    else:
        act = gate_up.linear(x_MD, up_bias, gate=activation)
    return experts.down[index].linear(act, down_bias)


FEW_TOKENS = {2: 3, 4: 16}
"""Bytes of a number -> the most tokens that an expert may get, on average, in C++. With more tokens
the loop over experts is faster, because torch's GEMMs keep tiles of weights and tokens in the
caches (benchmarks/results/moe-cpu.json)."""


class CpuMoeBackend(TorchMoeBackend):
    """In C++ (`kernel/csrc/moe.cpp`) if each expert gets few tokens."""

    ops: CpuOps

    def routed(self, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, experts: Experts) -> Tensor:
        are_few = ids_TK.numel() <= FEW_TOKENS[x_TD.dtype.itemsize] * experts.total
        is_compiled = experts.is_plain or experts.is_squared  # squared experts have no biases
        if not (are_few and is_compiled):
            return super().routed(x_TD, weights_TK, ids_TK, experts)
        return self.ops.experts(
            x_TD, experts.gate_up_LGD, experts.down_LDF, weights_TK, ids_TK, experts.first
        )
