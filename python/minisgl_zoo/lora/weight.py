"""A weight with adapters: y = W x + B A x, where A and B are those of each token's adapter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minisgl.quantization import Part, TensorOwner, Weight
from minisgl_zoo.lora.products import AllSlots, EachSlot, Products, Rows

if TYPE_CHECKING:
    from minisgl.kernel.ops import Activation


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
            return slots_T
        used = sorted(set(slots_T.tolist()))
        if len(used) == 1:
            return [(used[0], None)] if used[0] else []
        return [(slot, (slots_T == slot).nonzero()[:, 0]) for slot in used if slot]


class AdaptedWeight(Weight):
    """base: the weight without adapters. parts: its parts (`BuildContext.linear`). products: of its
    adapters, once the weight is loaded."""

    products: Products

    def __init__(self, base: Weight, parts: Sequence[Part], step: StepRows) -> None:
        TensorOwner.__init__(self)
        self.ops, self.dtype = base.ops, base.dtype
        self.base, self.parts, self.step = base, tuple(parts), step

    def _products(self, device: torch.device) -> Products:
        sizes = self.parts, self.step.num_slots, self.step.rank
        if not self.step.is_gpu:
            return EachSlot(*sizes)
        return AllSlots(*sizes, self.dtype, device, self.ops.name)

    @property
    def num_buffer_bytes(self) -> int:
        return self._products(torch.device("meta")).num_bytes

    def init_buffers(self, device: torch.device) -> None:
        self.products = self._products(device)

    # --- as a weight ---------------------------------------------------------------------------

    def dense(self) -> Tensor:
        return self.base.dense()

    def gates_input(self, num_rows: int) -> bool:
        return self.base.gates_input(num_rows)

    def linear(
        self, x: Tensor, bias: Tensor | None = None, gate: Activation | None = None
    ) -> Tensor:
        rows = self.step.of(len(x))
        if rows is None or not self.products.is_changed:
            return self.base.linear(x, bias, gate)
        # A's products first: on a GPU the base's kernel fetches its weights meanwhile.
        h = self.products.down(x, rows)
        y = self.base.linear(x, bias)
        self.products.up(h, y, rows)
        return self.ops.gated(y, gate) if gate else y

    def gated_linear(self, x: Tensor, gate: Activation, bias: Tensor | None = None) -> Tensor:
        if self.step.of(len(x)) is None:
            return self.base.gated_linear(x, gate, bias)
        return super().gated_linear(x, gate, bias)

    def norm_linear(
        self, x: Tensor, residual: Tensor | None, norm_weight: Tensor | None, eps: float,
        bias: Tensor | None, gate: Activation | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        if self.step.of(len(x)) is None:
            return self.base.norm_linear(x, residual, norm_weight, eps, bias, gate)
        return super().norm_linear(x, residual, norm_weight, eps, bias, gate)
