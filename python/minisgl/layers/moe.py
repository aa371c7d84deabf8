"""A mixture of experts in place of a block's MLP: route each token to a few of many small MLPs.

Ranks share the experts in one of two ways. By width, as other layers (`--tp` alone): each rank has
some columns of every expert. By expert (`--ep`): each has all of some experts. Either way every
rank routes every token, computes what it has, and the norm after it adds all, the shared expert
included. So both need no exchange of tokens (docs/decisions/0011 has the numbers).

Axes: T tokens, D hidden size, E experts, L those of this rank, F intermediate size of an expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minisgl.layers.base import BaseOP, BuildContext, Part, Stack
from minisgl.layers.norm import RMSNormFused
from minisgl.layers.shard import split
from minisgl.moe import Experts

if TYPE_CHECKING:
    from minisgl.moe import BaseMoeBackend


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """Of one layer's tensors. A checkpoint has a tensor for each expert, {} being its number, or
    one for all: [E, 2F, D], gate then up, and [E, D, F]."""

    router: str
    router_alias: str | None
    gate: str
    up: str
    down: str
    all_gate_up: str
    all_down: str


class MoE(BaseOP):
    """The weighted sum of the `top_k` experts that the router prefers (`Ops.route`)."""

    router: Tensor
    gate_up: Tensor
    down: Tensor

    def __init__(
        self,
        build: BuildContext,
        backend: BaseMoeBackend,
        *,
        hidden_size: int,
        inner_size: int,
        num_experts: int,
        top_k: int,
        renormalise: bool,
        names: ExpertNames,
        shared: SharedExpert | None,
    ) -> None:
        super().__init__()
        self.ops, self.comm, self.shared = build.ops, build.comm, shared
        self._backend = backend
        self._top_k, self._renormalise, self._total = top_k, renormalise, num_experts
        held, columns = range(num_experts), range(inner_size)
        if build.expert_parallel:
            held = split(num_experts, self.comm.size)[self.comm.rank]
        else:
            columns = build.columns(inner_size)
        self._first = held.start
        router = Part(
            name=names.router,
            alias=names.router_alias,
            shape=(num_experts, hidden_size),
            axis=0,
            share=range(num_experts),
        )
        self.declare("router", build.dtype, router)

        def part(name: str, expert: int, stack: Stack, *, is_down: bool = False) -> Part:
            size = (inner_size, hidden_size)
            is_held = expert in held  # of the others nothing is read
            return Part(
                name=name.format(expert),
                shape=size[::-1] if is_down else size,
                axis=int(is_down and is_held),
                share=columns if is_held else range(0),
                stack=stack,
            )

        gate_up_shape = (num_experts, 2 * inner_size, hidden_size)
        down_shape = (num_experts, hidden_size, inner_size)
        gate_up, down = [], []
        for expert in range(num_experts):
            for name, first in ((names.gate, 0), (names.up, inner_size)):
                stack = Stack(names.all_gate_up, gate_up_shape, expert, first)
                gate_up.append(part(name, expert, stack))
            stack = Stack(names.all_down, down_shape, expert, 0)
            down.append(part(names.down, expert, stack, is_down=True))
        self.declare("gate_up", build.dtype, *gate_up, stacked=len(held))
        self.declare("down", build.dtype, *down, stacked=len(held))

    def forward(
        self, norm: RMSNormFused, x_TD: Tensor, residual_TD: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Apply norm, then the experts. Returns (output, residual)."""
        x_TD, residual_TD = norm.forward(x_TD, residual_TD)
        experts = Experts(
            gate_up_LGD=self.gate_up,
            down_LDF=self.down,
            first=self._first,
            total=self._total,
            top_k=self._top_k,
            renormalise=self._renormalise,
        )
        out_TD = self._backend.forward(x_TD, self.ops.linear(x_TD, self.router), experts)
        if self.shared:
            out_TD = out_TD + self.shared.forward(x_TD)
        return out_TD, residual_TD


class SharedExpert(BaseOP):
    """An MLP that every token takes, times sigmoid(gate(x)): this rank's part of the sum."""

    gate_up: Tensor
    down: Tensor
    gate: Tensor

    def __init__(
        self, build: BuildContext, *, hidden_size: int, inner_size: int, prefix: str
    ) -> None:
        """prefix: of the layer's MLP in the checkpoint."""
        super().__init__()
        self.ops = build.ops
        columns = build.columns(inner_size)
        name = f"{prefix}.shared_expert.{{}}_proj.weight"
        up = (inner_size, hidden_size)
        parts = [
            Part(name=name.format(kind), shape=up, axis=0, share=columns) for kind in ("gate", "up")
        ]
        self.declare("gate_up", build.dtype, *parts)
        self.declare(
            "down",
            build.dtype,
            Part(name=name.format("down"), shape=up[::-1], axis=1, share=columns),
        )
        gate = Part.whole(f"{prefix}.shared_expert_gate.weight", 1, hidden_size)
        self.declare("gate", build.dtype, gate)

    def forward(self, x_TD: Tensor) -> Tensor:
        act = self.ops.linear(x_TD, self.gate_up, gate="silu")
        open_T1 = torch.sigmoid(self.ops.linear(x_TD, self.gate))
        return open_T1 * self.ops.linear(act, self.down)
