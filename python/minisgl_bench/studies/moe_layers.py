"""One rank's part of real mixtures: shapes, random weights and inputs, GPU time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from minisgl.benchmark.perf import captured, events_s
from minisgl.kernel.ops import Ops
from minisgl.moe import Experts
from minisgl.quantization import PlainWeight


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of one rank's part of a layer. inner: an expert's intermediate size on the rank."""

    hidden: int
    inner: int
    experts: int
    top_k: int

    @property
    def expert_params(self) -> int:
        return 3 * self.hidden * self.inner


SHAPES = {
    "qwen3-30b-a3b": Shape(hidden=2048, inner=768, experts=128, top_k=8),
    "qwen3-30b-a3b-tp2": Shape(hidden=2048, inner=384, experts=128, top_k=8),
    "qwen3-30b-a3b-tp4": Shape(hidden=2048, inner=192, experts=128, top_k=8),
    "qwen3-235b-a22b-tp2": Shape(hidden=4096, inner=768, experts=128, top_k=8),
    "qwen3-235b-a22b-tp4": Shape(hidden=4096, inner=384, experts=128, top_k=8),
    "qwen3-235b-a22b-tp8": Shape(hidden=4096, inner=192, experts=128, top_k=8),
    "qwen3-235b-a22b-ep": Shape(hidden=4096, inner=1536, experts=128, top_k=8),
    "small": Shape(hidden=1024, inner=384, experts=32, top_k=4),
    "slice": Shape(hidden=2048, inner=768, experts=16, top_k=8),
}


def make_experts(shape: Shape, device: torch.device, dtype: torch.dtype) -> Experts:
    size = (shape.experts, 2 * shape.inner, shape.hidden)
    gate_up = torch.empty(size, device=device, dtype=dtype).normal_(0, size[2] ** -0.5)
    down = torch.empty((size[0], shape.hidden, shape.inner), device=device, dtype=dtype)
    return Experts(
        gate_up=PlainWeight.of(Ops(), gate_up),
        down=PlainWeight.of(Ops(), down.normal_(0, shape.inner**-0.5)),
        count=shape.experts,
        first=0,
        total=shape.experts,
        top_k=shape.top_k,
        renormalise=True,
    )


def make_inputs(
    shape: Shape, tokens: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    return (
        torch.randn(tokens, shape.hidden, device=device).to(dtype),
        torch.randn(tokens, shape.experts, device=device).to(dtype),
    )


def gpu_layers(shape: Shape) -> list[Experts]:
    """Return layers of several GB together: more than any cache keeps."""
    count = max(2, min(16, int(4e9 / (2 * shape.experts * shape.expert_params))))
    return [make_experts(shape, torch.device("cuda"), torch.bfloat16) for _ in range(count)]


def graph_s(run: Callable[[], None], budget_s: float = 0.15) -> float:
    """Return the seconds of a replay of `run`, captured as a CUDA graph."""
    replay, _ = captured(run)
    return events_s(replay, max(3, int(budget_s / events_s(replay))))
