"""Weights in the layout of the CPU's kernels (`kernel/csrc/panels.h`).

The loader fills rows, as for any weight. Then they are packed in place, so the weight needs no
second copy.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minisgl.kernel.cpu import CpuOps
from minisgl.quantization.weight import Format, PlainWeight, Weight

if TYPE_CHECKING:
    from minisgl.kernel.ops import Activation


class NormFirst(Weight):
    """A weight whose kernels compute no norm. A subclass writes `linear`."""

    def norm_linear(
        self,
        x: Tensor,
        residual: Tensor | None,
        norm_weight: Tensor | None,
        eps: float,
        bias: Tensor | None,
        gate: Activation | None = None,
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.ops.normed(x, residual, norm_weight, eps)
        return self.linear(x, bias, gate), residual


class CpuWeight(NormFirst):
    """A weight that the CPU's kernels multiply, whatever its shape."""

    ops: CpuOps


class PackedWeight(CpuWeight, PlainWeight):
    """Numbers of the activations' dtype. `tensor` is packed once it is loaded."""

    def init_buffers(self, device: torch.device) -> None:
        self.ops.pack(self.tensor)

    def dense(self) -> Tensor:
        return self.ops.unpack(self.tensor)

    def linear(
        self, x: Tensor, bias: Tensor | None = None, gate: Activation | None = None
    ) -> Tensor:
        return self.ops.packed_linear(x, self.tensor, bias, gate)

    def logits(self, x_SD: Tensor) -> Tensor:
        return self.ops.packed_logits(x_SD, self.tensor)

    def rows(self, ids_T: Tensor, share: range | None = None) -> Tensor:
        return rows_of_share(partial(self.ops.packed_rows, weight=self.tensor), ids_T, share)


def rows_of_share(rows: Callable[[Tensor], Tensor], ids_T: Tensor, share: range | None) -> Tensor:
    """Look up ids in a table whose first row is share.start. Ids outside of the share give zeros.
    rows: looks up ids of the table's own rows."""
    if share is None:
        return rows(ids_T)
    elsewhere_T = (ids_T < share.start) | (ids_T >= share.stop)
    x_TD = rows((ids_T - share.start).masked_fill(elsewhere_T, 0))
    return x_TD.masked_fill_(elsewhere_T[:, None], 0)


PACKED = Format(weight=PackedWeight)
