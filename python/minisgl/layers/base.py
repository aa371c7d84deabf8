"""What every layer is: attributes that hold tensors, and declarations that say how to fill them.

A parameter is declared with the checkpoint tensors that it is made of, the shape that each has
there and the slice of it that this rank holds (`minisgl.layers.shard`). Merged parameters stack
their parts along axis 0::

    checkpoint   q_proj.weight [Q, D]   k_proj.weight [K, D]   v_proj.weight [K, D]
                        |  rank's rows         |                      |
    parameter    |== q ==|= k =|= v =|         on two ranks: [(Q + 2K) / 2, D]

Not `torch.nn.Module`: its hooks, buffers and state dicts would be unused, and a declaration per
parameter is what makes strict, sharded, streamed loading (`minisgl.models.weight`) one function.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

import torch
from torch import Tensor

from minisgl.layers.shard import split_columns

if TYPE_CHECKING:
    from minisgl.distributed import DistributedCommunicator
    from minisgl.kernel.ops import Ops


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """What a layer is given when it is built. dtype: of the parameters and the activations.

    expert_parallel: ranks share the experts of a mixture, not each expert's columns.
    """

    ops: Ops
    comm: DistributedCommunicator
    dtype: torch.dtype
    expert_parallel: bool = False

    def columns(self, width: int) -> range:
        """This rank's share of a layer's columns, see `split_columns`."""
        return split_columns(width, self.comm.size)[self.comm.rank]


@dataclass(frozen=True, slots=True)
class Stack:
    """Rows `first` and on of matrix `index` of a tensor that holds many matrices."""

    name: str
    shape: tuple[int, ...]
    index: int
    first: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A checkpoint tensor, of which this rank holds `share` along `axis`.

    shape: in the checkpoint. alias: another name under which a file may have the same tensor.
    stack: where files have it that hold it as a part of a larger one.
    """

    name: str
    shape: tuple[int, ...]
    axis: int
    share: range
    alias: str | None = None
    stack: Stack | None = None

    @classmethod
    def whole(cls, name: str, *shape: int) -> Part:
        """Every rank holds all of it."""
        return cls(name=name, shape=shape, axis=0, share=range(shape[0]))

    @property
    def local_shape(self) -> tuple[int, ...]:
        return (*self.shape[: self.axis], len(self.share), *self.shape[self.axis + 1 :])


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """Attribute `attr` of `owner`. Rows that no part fills are zero (vocabulary padding)."""

    owner: BaseOP
    attr: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[Part, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def set(self, tensor: Tensor) -> None:
        """Give the owner its tensor: from now on it computes with it."""
        assert tensor.shape == self.shape, f"{self.parts}: {tensor.shape} for {self.shape}"
        assert tensor.dtype == self.dtype, f"{self.parts}: {tensor.dtype} for {self.dtype}"
        setattr(self.owner, self.attr, tensor)


class BaseOP:
    """A layer: mutable, because its tensors are on `meta` until they are loaded.

    A subclass writes `forward`; sub-layers are simply attributes.
    """

    def __init__(self) -> None:
        # Without their owner: a cycle would keep weights after the last use of their model.
        self._declared: list[partial[Parameter]] = []

    def declare(
        self,
        attr: str,
        dtype: torch.dtype,
        *parts: Part,
        rows: int | None = None,
        stacked: int | None = None,
    ) -> None:
        """Say what attribute `attr` is made of: `parts` one after another along axis 0, padded to
        `rows`; with `stacked` as so many equal matrices [stacked, rows of one, ...]."""
        filled = sum(part.local_shape[0] for part in parts)
        shape = (filled if rows is None else rows, *parts[0].local_shape[1:])
        if stacked is not None:
            shape = (stacked, filled // stacked, *shape[1:])
        self._declared.append(partial(Parameter, attr=attr, shape=shape, dtype=dtype, parts=parts))
        setattr(self, attr, torch.empty(shape, dtype=dtype, device="meta"))

    def init_buffers(self, device: torch.device) -> None:
        """Compute what no checkpoint holds."""

    @property
    def num_buffer_bytes(self) -> int:
        return 0

    def children(self) -> Iterator[BaseOP]:
        return (value for value in vars(self).values() if isinstance(value, BaseOP))

    def walk(self, _seen: set[int] | None = None) -> Iterator[BaseOP]:
        """This layer and all below it, each once though two may share it."""
        seen = set() if _seen is None else _seen
        if id(self) in seen:
            return
        seen.add(id(self))
        yield self
        for child in self.children():
            yield from child.walk(seen)

    def parameters(self) -> Iterator[Parameter]:
        """All parameters of this layer and those below it."""
        for op in self.walk():
            yield from (parameter(owner=op) for parameter in op._declared)

    @property
    def num_weight_bytes(self) -> int:
        """What this rank holds once loaded, parameters and tables; known on `meta` already."""
        parameters = sum(parameter.num_bytes for parameter in self.parameters())
        return parameters + sum(op.num_buffer_bytes for op in self.walk())


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

    def children(self) -> Iterator[BaseOP]:
        return iter(self._ops)

    def __iter__(self) -> Iterator[OP]:
        return iter(self._ops)

    def __getitem__(self, index: int) -> OP:
        return self._ops[index]
