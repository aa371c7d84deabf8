"""A mixture of experts, which replaces a block's MLP: each token is routed to a few of many small
MLPs.

The experts are split over ranks in one of two ways. By width (without `--ep`), like other layers:
each rank has some columns of every expert. By expert (`--ep`): each rank has all columns of some
experts. In both, every rank routes every token and computes its share, and the next norm
all-reduces the partial sums, the shared expert included. No tokens are exchanged (measured in
minisgl_kernels/README.md).

Axes: T tokens, D hidden size, E experts, L those of this rank, F intermediate size of an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from minisgl import plugins
from minisgl.layers.base import BaseOP, BuildContext
from minisgl.layers.linear import bias_of
from minisgl.layers.norm import RMSNormFused
from minisgl.layers.shard import split
from minisgl.moe import ClampedGate, Experts, SquaredRelu
from minisgl.quantization import Part, Stack, Weight

if TYPE_CHECKING:
    from minisgl.kernel.ops import Activation
    from minisgl.moe import BaseMoeBackend


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """The names of one layer's tensors.

    A checkpoint has either tensors for each expert (gate, up and down, where {} is the expert's
    number), or tensors for all experts: all_gate_up [E, 2F, D], gate then up, and all_down [E, D,
    F], with biases called NAME_bias. gate: None for experts without a gate, whose all_gate_up is
    [E, F, D].
    """

    router: str
    router_alias: str | None
    gate: str | None
    up: str
    down: str
    all_gate_up: str
    all_down: str


class MoELayer(BaseOP):
    """The weighted sum of the `top_k` experts that the router prefers (`Ops.route`)."""

    router_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    _adds_bias = True

    def __init__(
        self,
        build: BuildContext,
        backends: Callable[[type[Weight]], BaseMoeBackend],
        *,
        hidden_size: int,
        inner_size: int,
        num_experts: int,
        top_k: int,
        renormalise: bool,
        names: ExpertNames,
        shared: SharedExpert | None,
        activation: Activation | ClampedGate | SquaredRelu = "silu",
        bias: bool = False,
        expert_size: int | None = None,
    ) -> None:
        """backends: class of the experts' weights -> the backend. bias: whether router and experts
        have biases. expert_size: the size of an expert's input and output; None is hidden_size."""
        super().__init__()
        self.shared, self._activation = shared, activation
        self._top_k, self._renormalise, self._total = top_k, renormalise, num_experts
        expert_size = expert_size or hidden_size
        held, columns = range(num_experts), range(inner_size)
        if build.expert_parallel:
            held = split(num_experts, build.comm.size)[build.comm.rank]
        else:
            columns = build.columns(inner_size, *map(_module, filter(None, (names.gate, names.up))))
        self._first, self._count = held.start, len(held)
        router = Part(
            name=names.router,
            alias=names.router_alias,
            shape=(num_experts, hidden_size),
            axis=0,
            share=range(num_experts),
        )
        self.router = build.weight(router)
        if bias:
            name = f"{router.module}.bias"
            self.declare("router_bias", build.dtype, Part.whole(name, num_experts))

        def part(name: str, expert: int, stack: Stack, *, is_down: bool = False) -> Part:
            size = (inner_size, expert_size)
            is_held = expert in held  # other ranks' experts are not loaded
            return Part(
                name=name.format(expert),
                shape=size[::-1] if is_down else size,
                axis=int(is_down and is_held),
                share=columns if is_held else range(0),
                stack=stack,
            )

        first_up = inner_size if names.gate else 0
        gate_up_shape = (num_experts, first_up + inner_size, expert_size)
        down_shape = (num_experts, expert_size, inner_size)
        gate_up, down = [], []
        for expert in range(num_experts):
            for own, first in ((names.gate, 0), (names.up, first_up)):
                if own:
                    stack = Stack(names.all_gate_up, gate_up_shape, expert, first)
                    gate_up.append(part(own, expert, stack))
            stack = Stack(names.all_down, down_shape, expert, 0)
            down.append(part(names.down, expert, stack, is_down=True))
        self.gate_up = build.weight(*gate_up, stacked=len(held))
        self.down = build.weight(*down, stacked=len(held))
        if bias:
            self.declare("gate_up_bias", build.dtype, *map(_bias, gate_up), stacked=len(held))
            # The all-reduce must add the bias once.
            self._adds_bias = build.expert_parallel or build.comm.rank == 0
            self.declare("down_bias", build.dtype, *map(_bias, down), stacked=len(held))
        self._backend = backends(type(self.gate_up))

    def forward(
        self, norm: RMSNormFused, x_TD: Tensor, residual_TD: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Apply norm, then the experts. Returns (output, residual)."""
        x_TD, residual_TD = norm.forward(x_TD, residual_TD)
        out_TD = self.mix(x_TD)
        if self.shared:
            out_TD = self.shared.add(out_TD, x_TD)
        return out_TD, residual_TD

    def mix(self, x_TD: Tensor) -> Tensor:
        """Route normed x. Returns the weighted sum of the experts of this rank."""
        return self._backend.forward(x_TD, self.router.linear(x_TD, self.router_bias), self.experts)

    @property
    def experts(self) -> Experts:
        return Experts(
            gate_up=self.gate_up,
            down=self.down,
            count=self._count,
            first=self._first,
            total=self._total,
            top_k=self._top_k,
            renormalise=self._renormalise,
            activation=self._activation,
            gate_up_bias=self.gate_up_bias,
            down_bias=self.down_bias if self._adds_bias else None,
        )


class SharedExpert(BaseOP):
    """An MLP for every token, times sigmoid(gate(x)). Outputs are this rank's partial sums."""

    module: ClassVar[str] = "shared_expert"
    gate: Weight | None = None

    def __init__(
        self, build: BuildContext, *, hidden_size: int, inner_size: int, prefix: str
    ) -> None:
        """prefix: of the layer's MLP in the checkpoint."""
        super().__init__()
        self._add_gated = plugins.find("ops", "add_gated", ops=build.ops.name) or add_gated
        self._declare(build, prefix, hidden_size, inner_size)

    def _declare(self, build: BuildContext, prefix: str, hidden_size: int, inner_size: int) -> None:
        gate, up, down = (f"{prefix}.{self.module}.{kind}_proj" for kind in ("gate", "up", "down"))
        columns = build.columns(inner_size, gate, up)
        shape = (inner_size, hidden_size)
        self.gate_up = build.linear(
            *(Part(name=f"{n}.weight", shape=shape, axis=0, share=columns) for n in (gate, up))
        )
        self.down = build.linear(
            Part(name=f"{down}.weight", shape=shape[::-1], axis=1, share=columns)
        )
        self._declare_gate(build, f"{prefix}.shared_expert_gate.weight", hidden_size)

    def _declare_gate(self, build: BuildContext, name: str, hidden_size: int) -> None:
        self.gate = build.weight(Part.whole(name, 1, hidden_size))

    def forward(self, x_TD: Tensor) -> Tensor:
        """Return the MLP's output, without the gate."""
        return self.down.linear(self.gate_up.linear(x_TD, gate="silu"))

    def add(self, routed_TD: Tensor, x_TD: Tensor) -> Tensor:
        """Return the routed experts' sum plus this expert's output for normed x."""
        out_TD = self.forward(x_TD)
        if not self.gate:
            return routed_TD + out_TD
        sum_TD: Tensor = self._add_gated(routed_TD, x_TD, self.gate, out_TD)
        return sum_TD


def add_gated(x_TD: Tensor, h_TD: Tensor, gate: Weight, y_TD: Tensor) -> Tensor:
    """Return x + sigmoid(gate.linear(h)) * y; each step is rounded to the tensors' dtype. gate:
    [1, D]."""
    return x_TD + gate.linear(h_TD).sigmoid() * y_TD


def _bias(part: Part) -> Part:
    """Return the bias of an expert's rows."""
    assert part.stack
    stack = replace(part.stack, name=f"{part.stack.name}_bias", shape=part.stack.shape[:2])
    return replace(bias_of(part), stack=stack)


def _module(name: str) -> str:
    """Return the module of the first expert. All experts have its format."""
    return name.format(0).removesuffix(".weight")
