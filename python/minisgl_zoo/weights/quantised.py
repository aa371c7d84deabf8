"""A quantised weight that GPU kernels multiply in its format.

A subclass writes `packed_form`, which gives its tensors to the kernels. If it returns None, or if
no package has kernels for the device, each GEMM dequantises the weight. `panelled` is the same for
the CPU.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from minisgl import plugins
from minisgl.kernel.ops import Activation
from minisgl_zoo.weights.packed import Gemms, Packed
from minisgl_zoo.weights.panelled import PanelledWeight


class QuantisedWeight(PanelledWeight):
    _kernels: Gemms | None = None
    packed_stack: Packed | None = None
    """Set instead of `_kernels` if this is a stack of experts, which `minisgl.moe` multiplies."""

    @abstractmethod
    def packed_form(self) -> Packed | None:
        """The loaded tensors for the kernels, or None if they cannot read this weight."""

    @property
    def has_kernel(self) -> bool:
        return bool(self.panels or self._kernels or self.packed_stack)

    def init_buffers(self, device: torch.device) -> None:
        super().init_buffers(device)
        gemms: type[Gemms] | None = plugins.find("ops", "packed", ops=self.ops.name)
        if gemms is None or self.dtype.itemsize != 2:
            return
        packed = self.packed_form()
        if packed is None or not gemms.reads(packed):
            return
        if len(packed.shape) == 3:
            self.packed_stack = packed
        else:
            self._kernels = gemms(self.ops, packed, self.dtype)

    def linear(
        self, x: Tensor, bias: Tensor | None = None, gate: Activation | None = None
    ) -> Tensor:
        if self._kernels:
            return self._kernels.linear(x, bias, gate)
        return super().linear(x, bias, gate)

    def logits(self, x_SD: Tensor) -> Tensor:
        return self._kernels.logits(x_SD) if self._kernels else super().logits(x_SD)

    def gates_input(self, num_rows: int) -> bool:
        return bool(self._kernels and self._kernels.quantises(num_rows))

    def gated_linear(self, x: Tensor, gate: Activation, bias: Tensor | None = None) -> Tensor:
        if self._kernels and self._kernels.quantises(len(x)):
            return self._kernels.gated_linear(x, gate, bias)
        return super().gated_linear(x, gate, bias)

    def norm_linear(
        self,
        x: Tensor,
        residual: Tensor | None,
        norm_weight: Tensor | None,
        eps: float,
        bias: Tensor | None,
        gate: Activation | None = None,
    ) -> tuple[Tensor, Tensor]:
        if self._kernels:
            return self._kernels.norm_linear(x, residual, norm_weight, eps, bias, gate)
        return super().norm_linear(x, residual, norm_weight, eps, bias, gate)


def is_size(inputs: int, group: int, *, is_4_bit: bool) -> bool:
    """Whether the kernels read rows of so many inputs with a scale for each `group` of them (0: one
    scale for all)."""
    least = 16 if is_4_bit else 32
    is_group = group == 0 or (group >= least and group & (group - 1) == 0)
    chunk = min(32, group or 32) if is_4_bit else 16
    return is_group and inputs % chunk == 0


def exact_16_bit(scale: Tensor) -> Tensor:
    """The scales in float16 or bfloat16 if this changes none of them, else as they are."""
    for dtype in (torch.float16, torch.bfloat16):
        if torch.equal(scale.to(dtype).float(), scale):
            return scale.to(dtype)
    return scale
