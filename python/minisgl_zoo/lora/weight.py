"""A weight with adapters: y = W x + scale * B A x, where A and B are those of each token's adapter.

N slots each have room for an A and a B of rank R. Slots that an adapter does not use, and ranks
above its own, are zeros. A has no part for each output, so merged layers have one A for each name::

    qkv   x --[A_q; A_k; A_v]--> h, [T, 3 R] --B_q, B_k, B_v--> added to the columns of q, k and v

On a CPU the tokens of one slot after another are multiplied, in float32: a product of few rows in
bfloat16 takes torch ten times as long. On a GPU all slots are multiplied at
once, and a mask keeps what belongs to a token: N * R columns are few beside the weight's, the
kernels are plain GEMMs, and a CUDA graph can have them. The scale is part of B.

Axes: T tokens, N slots, P names, R rank, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minisgl.quantization import Part, TensorOwner, Weight

if TYPE_CHECKING:
    from minisgl.kernel.ops import Activation

Rows = Tensor | list[tuple[int, Tensor | None]]
"""Which slot each of some tokens uses: on a GPU bool [T, N]; on a CPU the slots with the indices of
their tokens, None for all."""


class StepRows:
    """The slots that the tokens of the current forward pass use. Mutable: the engine sets it before
    each pass, and the weights read it. It is no argument of `forward`, because only weights with
    adapters need it.

    num_slots: N. rank: R.
    """

    def __init__(self, num_slots: int, rank: int, *, is_gpu: bool) -> None:
        self.num_slots, self.rank, self.is_gpu = num_slots, rank, is_gpu
        self._by_count: dict[int, Rows] = {}

    def begin(self, slots_T: Tensor | None, positions_S: Tensor) -> None:
        """See `EngineAdapters.begin`. Layers have all tokens, or those at positions_S if these are
        fewer, so the number of tokens says which."""
        self._by_count.clear()
        if slots_T is not None:
            self._by_count[len(positions_S)] = self._rows(slots_T[positions_S])
            self._by_count[len(slots_T)] = self._rows(slots_T)

    def of(self, num_tokens: int) -> Rows | None:
        """Return the slots of a layer's tokens; None if no token of the step has an adapter."""
        return self._by_count[num_tokens] if self._by_count else None

    def _rows(self, slots_T: Tensor) -> Rows:
        if self.is_gpu:
            return slots_T[:, None] == torch.arange(1, self.num_slots + 1, device=slots_T.device)
        used = sorted(set(slots_T.tolist()))
        if len(used) == 1:
            return [(used[0], None)] if used[0] else []
        return [(slot, (slots_T == slot).nonzero()[:, 0]) for slot in used if slot]


class AdaptedWeight(Weight):
    """Mutable: its slots are filled while the engine runs.

    base: the weight without adapters. parts: its parts (`BuildContext.linear`). is_changed: whether
    an adapter has ever changed it; until then a GPU's steps leave its products out.
    """

    is_changed = False

    a: Tensor  # [N, P, R, I]
    b: tuple[Tensor, ...]  # for each part [N, R, O]

    def __init__(self, base: Weight, parts: Sequence[Part], step: StepRows) -> None:
        TensorOwner.__init__(self)
        self.ops, self.dtype = base.ops, base.dtype
        self.base, self.parts, self.step = base, tuple(parts), step
        self.names = tuple(dict.fromkeys(part.name for part in parts))
        self._a_of = [self.names.index(part.name) for part in parts]
        sizes = [rows_of(part) for part in parts]
        starts = accumulate(map(len, sizes), initial=0)
        self._columns = [slice(at, at + len(rows)) for at, rows in zip(starts, sizes, strict=False)]
        self._inputs = len(inputs_of(parts[0]))
        self._filled: set[int] = set()
        self._dtype = self.dtype if step.is_gpu else torch.float32

    @property
    def num_buffer_bytes(self) -> int:
        per_rank = len(self.names) * self._inputs + self._columns[-1].stop
        return self.step.num_slots * self.step.rank * per_rank * self._dtype.itemsize

    def init_buffers(self, device: torch.device) -> None:
        slots, rank, dtype = self.step.num_slots, self.step.rank, self._dtype
        shape = (slots, len(self.names), rank, self._inputs)
        self.a = torch.zeros(shape, dtype=dtype, device=device)
        self.b = tuple(
            torch.zeros(slots, rank, at.stop - at.start, dtype=dtype, device=device)
            for at in self._columns
        )

    def fill(self, slot: int, a: Mapping[str, Tensor], b: Mapping[int, Tensor]) -> None:
        """Put an adapter into a slot. a: by name, [rank, I]. b: by part, [O, rank]."""
        self.a[slot - 1].zero_()
        for name, given in a.items():
            self.a[slot - 1, self.names.index(name), : len(given)] = given
        for part, held in enumerate(self.b):
            held[slot - 1].zero_()
            if part in b:
                held[slot - 1, : b[part].shape[1]] = b[part].T
        (self._filled.add if b else self._filled.discard)(slot)
        self.is_changed |= bool(b)

    # --- as a weight ---------------------------------------------------------------------------

    def dense(self) -> Tensor:
        return self.base.dense()

    def gates_input(self, num_rows: int) -> bool:
        return self.base.gates_input(num_rows)

    def linear(
        self, x: Tensor, bias: Tensor | None = None, gate: Activation | None = None
    ) -> Tensor:
        rows = self.step.of(len(x))
        if rows is None:
            return self.base.linear(x, bias, gate)
        y = self.base.linear(x, bias)
        self._add(x, y, rows)
        return self.ops.gated(y, gate) if gate else y

    def gated_linear(self, x: Tensor, gate: Activation, bias: Tensor | None = None) -> Tensor:
        if self.step.of(len(x)) is None:
            return self.base.gated_linear(x, gate, bias)
        return self.linear(self.ops.gated(x, gate), bias)

    def norm_linear(
        self, x: Tensor, residual: Tensor | None, norm_weight: Tensor | None, eps: float,
        bias: Tensor | None, gate: Activation | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        if self.step.of(len(x)) is None:
            return self.base.norm_linear(x, residual, norm_weight, eps, bias, gate)
        x, residual = self.ops.normed(x, residual, norm_weight, eps)
        return self.linear(x, bias, gate), residual

    def _add(self, x: Tensor, y: Tensor, rows: Rows) -> None:
        """Add the adapters' part to y, [T, O], in place."""
        if isinstance(rows, Tensor):
            if self.is_changed:
                self._add_masked(x, y, rows)
            return
        for slot, own in rows:
            if slot not in self._filled:
                continue
            some = (x if own is None else x[own]).float()
            h = some @ self.a[slot - 1].flatten(0, 1).T
            for h_TR, columns, b in self._halves(h):
                product = h_TR @ b[slot - 1]
                if own is None:
                    y[:, columns] += product
                else:
                    y[:, columns].index_add_(0, own, product.to(y.dtype))

    def _add_masked(self, x: Tensor, y: Tensor, mask_TN: Tensor) -> None:
        slots, names, rank, _ = self.a.shape
        h = (x @ self.a.flatten(0, 2).T).view(len(x), slots, names, rank)
        # Not a product: another adapter's A may overflow on these tokens.
        h = h.where(mask_TN[:, :, None, None], h.new_zeros(()))
        for h_TK, columns, b in self._halves(h.transpose(1, 2).reshape(len(x), -1)):
            y[:, columns].addmm_(h_TK, b.flatten(0, 1))

    def _halves(self, h: Tensor) -> list[tuple[Tensor, slice, Tensor]]:
        """Return for each part its columns of h, which has those of one name after another, its
        columns of y, and its B."""
        by_name = h.chunk(len(self.names), dim=1)
        return [
            (by_name[index], columns, b)
            for index, columns, b in zip(self._a_of, self._columns, self.b, strict=True)
        ]


def rows_of(part: Part) -> range:
    """Return this rank's outputs."""
    return part.share if part.axis == 0 else range(part.shape[0])


def inputs_of(part: Part) -> range:
    """Return this rank's inputs."""
    return part.share if part.axis == 1 else range(part.shape[1])
