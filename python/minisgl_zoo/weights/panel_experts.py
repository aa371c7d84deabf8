"""Quantised experts on a CPU: one call of C++ (`csrc/moe_scaled.cpp`) for all of a layer."""

from __future__ import annotations

from typing import Final, cast

import torch
from torch import Tensor

from minisgl.kernel.cpu import GATES, PANEL, CpuOps
from minisgl.kernel.ops import Ops
from minisgl.moe.base import ClampedGate, Experts, SquaredRelu, TorchMoeBackend
from minisgl.quantization import Weight
from minisgl_zoo.weights.panels import Panels
from minisgl_zoo.weights.quantised import QuantisedWeight

CLAMPED: Final = 3
SQUARED: Final = 4
"""The values of `Activation` in csrc/moe_scaled.cpp, beside `GATES`."""


class PanelMoeBackend(TorchMoeBackend):
    """Experts whose weights have no panels are computed in the loop over experts."""

    def routed(self, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, experts: Experts) -> Tensor:
        up, down = _panels(experts.gate_up), _panels(experts.down)
        if up is None or down is None or down.inputs % PANEL:
            return super().routed(x_TD, weights_TK, ids_TK, experts)
        ops, activation = cast("CpuOps", self.ops), experts.activation
        alpha = limit = 0.0
        if isinstance(activation, ClampedGate):
            code, alpha, limit = CLAMPED, activation.alpha, activation.limit
        elif isinstance(activation, SquaredRelu):
            code = SQUARED
        else:
            code = GATES[activation]
        out_TD = torch.empty(x_TD.shape, dtype=x_TD.dtype)
        ops.calls.scaled_experts(
            x_TD, *up.tensors, *down.tensors, weights_TK, ids_TK,
            experts.gate_up_bias, experts.down_bias, code, alpha, limit, out_TD,
            down.inputs, experts.first, experts.count, torch.get_num_threads(),
        )  # fmt: skip
        return out_TD


def _panels(weight: Weight) -> Panels | None:
    return weight.panels if isinstance(weight, QuantisedWeight) else None


def create_backend(ops: Ops, dtype: torch.dtype) -> PanelMoeBackend:
    """Return the backend. It asks no processor for a feature, so `dtype` changes nothing."""
    return PanelMoeBackend(ops)
