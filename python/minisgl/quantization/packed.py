"""Weights in the layout of the CPU's kernels (`kernel/csrc/panels.h`).

The loader fills rows, as for any weight. Then they are packed in place, so the weight needs no
second copy.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minisgl.kernel.cpu import CpuOps
from minisgl.kernel.ops import rows_of_share
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


class PackedWeight(NormFirst, PlainWeight):
    """Numbers of the activations' dtype. `tensor` is packed once it is loaded."""

    ops: CpuOps

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


PACKED = Format(weight=PackedWeight)
