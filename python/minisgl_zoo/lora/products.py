"""How the adapters in the slots of a weight are multiplied: one class for CPUs, one for GPUs.

An adapter adds B A x for each part of the weight; parts of one name have one A. The scale is in B::

    qkv   x --[A_q; A_k; A_v]--> h, [T, 3 R] --B_q, B_k, B_v--> added to the columns of q, k and v

Axes: T tokens, N slots, P names, R rank, I inputs, O outputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Protocol

import torch
from torch import Tensor

from minisgl import plugins
from minisgl.quantization import Part

MIN_RANK = 16
"""The least rank of a slot. Ranks are powers of two, so that matrix instructions take them."""
Inner = Tensor | list[Tensor]
"""Products by A's: on a GPU one tensor, on a CPU one for each slot that has an adapter."""
Rows = Tensor | list[tuple[int, Tensor | None]]
"""Which slot each of some tokens uses: on a GPU [T], 0 for none; on a CPU the slots with the
indices of their tokens, None for all."""


class Products(ABC):
    """Mutable: the slots are filled while the engine runs.

    num_slots: N. rank: R. names: of the A's, without repetition. a_of: for each part, the index of
    its A. columns: of each part. inputs: I. outputs: O, of all parts. is_changed: whether an
    adapter has ever changed the weight; until then a GPU's steps leave its products out.
    """

    is_changed = False

    def __init__(self, parts: Sequence[Part], num_slots: int, rank: int) -> None:
        """parts: of the weight (`BuildContext.linear`)."""
        self.num_slots, self.rank = num_slots, rank
        self.names = tuple(dict.fromkeys(part.name for part in parts))
        self.a_of = [self.names.index(part.name) for part in parts]
        ends = list(accumulate(len(rows_of(part)) for part in parts))
        self.columns = [slice(*at) for at in pairwise((0, *ends))]
        self.inputs, self.outputs = len(inputs_of(parts[0])), ends[-1]

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """The most that all slots take."""

    def fill(self, slot: int, a: Mapping[int, Tensor], b: Mapping[int, Tensor]) -> None:
        """Put an adapter into a slot. a: by name's index, [rank, I]. b: by part, [O, rank]; empty
        if it does not change the weight."""
        self.is_changed |= bool(b)

    @abstractmethod
    def down(self, x: Tensor, rows: Rows) -> Inner:
        """Return the products of x, [T, I], by the A's of its tokens."""

    @abstractmethod
    def up(self, h: Inner, y: Tensor, rows: Rows) -> None:
        """Add the products of h by the B's to y, [T, O], in place."""


class EachSlot(Products):
    """On a CPU: the tokens of one slot after another, with the adapter's own ranks. B has zeros
    where a part does not read an A, so a slot takes two products. In float32, because a product of
    few rows in bfloat16 takes torch ten times as long."""

    def __init__(self, parts: Sequence[Part], num_slots: int, rank: int) -> None:
        super().__init__(parts, num_slots, rank)
        self._held: dict[int, tuple[Tensor, Tensor]] = {}  # slot -> A, [I, K], and B, [K, O]

    @property
    def num_bytes(self) -> int:
        rows = self.num_slots * len(self.names) * self.rank
        return 4 * rows * (self.inputs + self.outputs)

    def fill(self, slot: int, a: Mapping[int, Tensor], b: Mapping[int, Tensor]) -> None:
        super().fill(slot, a, b)
        self._held.pop(slot, None)
        if not b:
            return
        first, places = 0, {}
        for name, given in a.items():
            places[name] = slice(first, first + len(given))
            first += len(given)
        wide = torch.zeros(first, self.outputs)
        for part, given in b.items():
            wide[places[self.a_of[part]], self.columns[part]] = given.T
        self._held[slot] = torch.cat(list(a.values())).float().T.contiguous(), wide

    def down(self, x: Tensor, rows: Rows) -> list[Tensor]:
        assert isinstance(rows, list)
        return [
            (x if own is None else x[own]).float() @ self._held[slot][0]
            for slot, own in rows
            if slot in self._held
        ]

    def up(self, h: Inner, y: Tensor, rows: Rows) -> None:
        assert isinstance(rows, list)
        used = ((self._held[slot][1], own) for slot, own in rows if slot in self._held)
        for product, (b, own) in zip(h, used, strict=True):
            if own is None:
                y += product @ b
            else:
                y.index_add_(0, own, (product @ b).to(y.dtype))


class FewTokens(Protocol):
    """Kernels for one weight and few tokens (the op `adapters`)."""

    def takes(self, num_tokens: int, rank: int) -> bool: ...

    def down(self, x_TI: Tensor, slots_T: Tensor, a_NPRI: Tensor) -> Tensor:
        """Return the products by the A's, [T, P, R]; what a token without an adapter has is
        undefined. slots_T: 0 for no adapter; slot n is index n - 1 of a. All are contiguous."""

    def up(self, h_TPR: Tensor, y_TO: Tensor, slots_T: Tensor, b_NRO: Tensor) -> None:
        """Add the products by the B's to y, in place."""


class AllSlots(Products):
    """On a GPU: all slots at once, and a mask keeps what belongs to a token. N * R columns are few
    beside the weight's, and a CUDA graph can have the kernels: plain GEMMs, or for few tokens the
    op `adapters`. What a slot's adapter does not use is zeros."""

    def __init__(
        self, parts: Sequence[Part], num_slots: int, rank: int,
        dtype: torch.dtype, device: torch.device, ops: str,
    ) -> None:  # fmt: skip
        """ops: the name of the weight's ops."""
        super().__init__(parts, num_slots, rank)
        made = partial(torch.zeros, dtype=dtype, device=device)
        self.a = made(num_slots, len(self.names), rank, self.inputs)
        self.b = made(num_slots, rank, self.outputs)
        kernels = plugins.find("ops", "adapters", ops=ops)
        self._few: FewTokens | None = kernels and kernels(self, device)

    @property
    def num_bytes(self) -> int:
        return self.a.nbytes + self.b.nbytes

    def fill(self, slot: int, a: Mapping[int, Tensor], b: Mapping[int, Tensor]) -> None:
        super().fill(slot, a, b)
        self.a[slot - 1].zero_()
        for name, given in a.items():
            self.a[slot - 1, name, : len(given)] = given
        self.b[slot - 1].zero_()
        for part, given in b.items():
            self.b[slot - 1, : given.shape[1], self.columns[part]] = given.T

    def down(self, x: Tensor, rows: Rows) -> Tensor:
        """[T, P, R] for few tokens; else [T, N, P, R], zeros where a slot is not a token's."""
        assert isinstance(rows, Tensor)
        slots, names, rank, _ = self.a.shape
        if self._few and self._few.takes(len(x), rank):
            return self._few.down(x.contiguous(), rows, self.a)
        h = (x @ self.a.flatten(0, 2).T).view(len(x), slots, names, rank)
        is_own = rows[:, None] == torch.arange(1, slots + 1, device=x.device)
        # Not a product: another adapter's A may overflow on these tokens.
        return h.where(is_own[:, :, None, None], h.new_zeros(()))

    def up(self, h: Inner, y: Tensor, rows: Rows) -> None:
        assert isinstance(rows, Tensor)
        assert isinstance(h, Tensor)
        if self._few and h.dim() == 3:
            self._few.up(h, y, rows, self.b)
            return
        by_name = h.transpose(1, 2).reshape(len(h), -1).chunk(len(self.names), dim=1)
        for name, columns in zip(self.a_of, self.columns, strict=True):
            y[:, columns].addmm_(by_name[name], self.b[:, :, columns].flatten(0, 1))


def rows_of(part: Part) -> range:
    """Return this rank's outputs."""
    return part.share if part.axis == 0 else range(part.shape[0])


def inputs_of(part: Part) -> range:
    """Return this rank's inputs."""
    return part.share if part.axis == 1 else range(part.shape[1])
