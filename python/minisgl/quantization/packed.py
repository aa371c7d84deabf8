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


class PackedWeight(PlainWeight):
    """Numbers of the activations' dtype. `tensor` is packed once it is loaded."""

    ops: CpuOps
    norm_linear = Weight.norm_linear

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
