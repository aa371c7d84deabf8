"""Drawn layers, their results in float64, and how far others are from these."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.kernel.ops import Activation

BF16 = torch.bfloat16


def draw(outputs: int, inputs: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Weight, x and bias."""
    weight = torch.randn(outputs, inputs) * inputs**-0.5
    return weight.to(BF16), torch.randn(rows, inputs).to(BF16), torch.randn(outputs).to(BF16)


def exact(x: Tensor, weight: Tensor, bias: Tensor | None, gate: Activation | None) -> Tensor:
    y = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    if gate is None:
        return y
    gates, ups = y.chunk(2, -1)
    return (F.silu(gates) if gate == "silu" else F.gelu(gates, approximate="tanh")) * ups


def error(y: Tensor, expected: Tensor) -> float:
    return float((y.double() - expected).abs().max() / expected.abs().max())
