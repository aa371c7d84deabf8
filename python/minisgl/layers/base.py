"""The base classes of layers, and the context in which layers are built.

A layer declares its tensors (`minisgl.quantization.parameter`). Its matrices are weights of any
format (`minisgl.quantization.weight`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import torch
from torch import Tensor

from minisgl.layers.shard import split_columns
from minisgl.quantization import PLAIN, UNQUANTISED, Formats, Part, TensorOwner, Weight, WeightBuild
from minisgl.quantization.packed import PACKED

if TYPE_CHECKING:
    from minisgl.distributed import DistributedCommunicator
    from minisgl.kernel.ops import Ops
    from minisgl.quantization.weight import Target


Adapt = Callable[[Weight, Sequence[Part]], Weight]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """The constructor argument of all layers of a model.

    dtype: of the activations and of plain parameters. formats: the formats of the weights.
    expert_parallel: each rank holds whole experts of a mixture instead of some columns of each.
    adapt: returns the weight of linear layers with the adapters of a step's rows, from the weight
    and its parts; None if the engine has no adapters.
    """

    ops: Ops
    comm: DistributedCommunicator
    dtype: torch.dtype
    formats: Formats = UNQUANTISED
    expert_parallel: bool = False
    adapt: Adapt | None = None

    def columns(self, width: int, *modules: str) -> range:
        """Return this rank's share of the columns of linear layers, by `split_columns`. modules:
        the layers' names in the checkpoint."""
        unit = self.formats.of(modules, "Linear").unit
        return split_columns(width, self.comm.size, unit)[self.comm.rank]

    def weight(
        self,
        *parts: Part,
        target: Target = "Linear",
        rows: int | None = None,
        stacked: int | None = None,
    ) -> Weight:
        """Return one weight for linear layers that run as one GEMM, or for an embedding; see
        `WeightBuild`."""
        format = self.formats.of([part.module for part in parts], target)
        if format is PLAIN and stacked is None and self.ops.packs(self.dtype):
            format = PACKED
        return format.weight(
            WeightBuild(ops=self.ops, dtype=self.dtype, parts=parts, rows=rows, stacked=stacked)
        )

    def linear(self, *parts: Part) -> Weight:
        """Return the weight of linear layers that run as one GEMM, and that adapters may change. It
        is used by `Weight.linear` and the like, and never by `Weight.dense`."""
        weight = self.weight(*parts)
        return self.adapt(weight, parts) if self.adapt else weight


class BaseOP(TensorOwner):
    """A layer. A subclass writes `forward`; its sub-layers are attributes."""


class StateLessOP(BaseOP):
    """A layer without parameters of its own."""


class Identity(StateLessOP):
    """Returns its input, in place of a layer that a family does not have."""

    def forward(self, x: Tensor) -> Tensor:
        return x


OP = TypeVar("OP", bound=BaseOP)


class OPList(BaseOP, Generic[OP]):
    """Layers in order."""

    def __init__(self, ops: Sequence[OP]) -> None:
        super().__init__()
        self._ops = tuple(ops)

    def children(self) -> Iterator[TensorOwner]:
        return iter(self._ops)

    def __iter__(self) -> Iterator[OP]:
        return iter(self._ops)

    def __getitem__(self, index: int) -> OP:
        return self._ops[index]
