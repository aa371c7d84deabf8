"""What every layer is, and what it is given when it is built.

A layer declares its tensors (`minisgl.quantization.parameter`) and takes its matrices as weights,
whose format it does not ask for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import torch
from torch import Tensor

from minisgl.layers.shard import split_columns
from minisgl.quantization import UNQUANTISED, Formats, Part, TensorOwner, Weight

if TYPE_CHECKING:
    from minisgl.distributed import DistributedCommunicator
    from minisgl.kernel.ops import Ops
    from minisgl.quantization.weight import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """What a layer is given when it is built.

    dtype: of the activations and of plain parameters. formats: of the weights. expert_parallel:
    ranks share the experts of a mixture, not each expert's columns.
    """

    ops: Ops
    comm: DistributedCommunicator
    dtype: torch.dtype
    formats: Formats = UNQUANTISED
    expert_parallel: bool = False

    def columns(self, width: int, *modules: str) -> range:
        """This rank's share of the columns of linear layers, see `split_columns`. modules: their
        names in the checkpoint."""
        unit = self.formats.of(modules, "Linear").unit
        return split_columns(width, self.comm.size, unit)[self.comm.rank]

    def weight(
        self,
        *parts: Part,
        target: Target = "Linear",
        rows: int | None = None,
        stacked: int | None = None,
    ) -> Weight:
        """The weight of linear layers (or of an embedding) that are multiplied as one matrix; see
        `WeightClass`."""
        format = self.formats.of([part.module for part in parts], target)
        return format.weight(self.ops, self.dtype, parts, rows, stacked)


class BaseOP(TensorOwner):
    """A layer. A subclass writes `forward`; its sub-layers are attributes."""


class StateLessOP(BaseOP):
    """A layer without parameters of its own."""


class Identity(StateLessOP):
    """The step that a family leaves out."""

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
