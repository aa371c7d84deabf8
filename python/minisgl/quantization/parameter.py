"""Declarations of tensors: the slices of checkpoint tensors that a parameter is made of.

A declaration names the checkpoint tensors, the shape of each there, and the slice that this rank
holds (`minisgl.layers.shard`). A merged parameter has its parts one after another along axis 0::

    checkpoint   q_proj.weight [Q, D]   k_proj.weight [K, D]   v_proj.weight [K, D]
                        |  rank's rows         |                      |
    parameter    |== q ==|= k =|= v =|         on two ranks: [(Q + 2K) / 2, D]

Not `torch.nn.Module`: its hooks, buffers and state dicts would be unused, and a declaration per
parameter makes strict, sharded, streamed loading (`minisgl.models.loading.weight`) one function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Stack:
    """Where a matrix is inside of a larger checkpoint tensor: matrix `index` there, from row
    `first` on."""

    name: str
    shape: tuple[int, ...]
    index: int
    first: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A checkpoint tensor. This rank holds `share` of it along `axis`.

    shape: in the checkpoint. alias: another name under which a file may hold the tensor. stack: its
    place in files that hold it inside of a larger tensor. unread: names of tensors that a file may
    hold beside it and that are not read. stored: its dtype in the files, if the parameter has
    another one. rearrange: makes the parameter's rows from this rank's share as read; None keeps
    them. fills: does the same by a kernel, from the share into the parameter's rows.
    """

    name: str
    shape: tuple[int, ...]
    axis: int
    share: range
    alias: str | None = None
    stack: Stack | None = None
    unread: tuple[str, ...] = ()
    stored: torch.dtype | None = None
    rearrange: Callable[[Tensor], Tensor] | None = None
    fills: Callable[[Tensor, Tensor], None] | None = None

    @classmethod
    def whole(cls, name: str, *shape: int) -> Part:
        """A tensor that every rank holds whole."""
        return cls(name=name, shape=shape, axis=0, share=range(shape[0]))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this rank's share in the parameter."""
        shape = (*self.shape[: self.axis], len(self.share), *self.shape[self.axis + 1 :])
        if self.rearrange:
            return tuple(self.rearrange(torch.empty(shape, dtype=self.stored, device="meta")).shape)
        return shape

    @property
    def module(self) -> str:
        """The checkpoint's name of the module that owns the tensor."""
        return self.name.removesuffix(".weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """Attribute `attr` of `owner`. Rows that no part fills are zero (vocabulary padding)."""

    owner: TensorOwner
    attr: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[Part, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def set(self, tensor: Tensor) -> None:
        """Give the owner its tensor; it computes with it from now on."""
        assert tensor.shape == self.shape, f"{self.parts}: {tensor.shape} for {self.shape}"
        assert tensor.dtype == self.dtype, f"{self.parts}: {tensor.dtype} for {self.dtype}"
        setattr(self.owner, self.attr, tensor)


class TensorOwner:
    """A node of the model: it declares tensors, and its attributes may be further nodes.

    Mutable: its tensors are on `meta` until they are loaded.
    """

    def __init__(self) -> None:
        # Without their owner: a reference cycle would keep weights after their model's last use.
        self._declared: list[partial[Parameter]] = []

    def declare(
        self,
        attr: str,
        dtype: torch.dtype,
        *parts: Part,
        rows: int | None = None,
        stacked: int | None = None,
    ) -> None:
        """Declare attribute `attr`: `parts` one after another along axis 0.

        rows: pad with zeros to this many. stacked: view as this many equal matrices [stacked, rows
        of one, ...].
        """
        filled = sum(part.local_shape[0] for part in parts)
        shape = (filled if rows is None else rows, *parts[0].local_shape[1:])
        if stacked is not None:
            shape = (stacked, filled // stacked, *shape[1:])
        self._declared.append(partial(Parameter, attr=attr, shape=shape, dtype=dtype, parts=parts))
        setattr(self, attr, torch.empty(shape, dtype=dtype, device="meta"))

    def init_buffers(self, device: torch.device) -> None:
        """Compute what no checkpoint holds. Called once, when all tensors are loaded."""

    @property
    def num_buffer_bytes(self) -> int:
        return 0

    def children(self) -> Iterator[TensorOwner]:
        return (value for value in vars(self).values() if isinstance(value, TensorOwner))

    def walk(self, _seen: set[int] | None = None) -> Iterator[TensorOwner]:
        """This node and all below it. A node that is below two others comes once."""
        seen = set() if _seen is None else _seen
        if id(self) in seen:
            return
        seen.add(id(self))
        yield self
        for child in self.children():
            yield from child.walk(seen)

    def parameters(self) -> Iterator[Parameter]:
        """All parameters of this node and of those below it."""
        for node in self.walk():
            yield from (parameter(owner=node) for parameter in node._declared)

    @property
    def num_weight_bytes(self) -> int:
        """Bytes that this rank holds once loaded, parameters and buffers; known on `meta`."""
        parameters = sum(parameter.num_bytes for parameter in self.parameters())
        return parameters + sum(node.num_buffer_bytes for node in self.walk())
