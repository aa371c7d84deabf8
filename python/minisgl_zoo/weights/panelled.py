"""A quantised weight that the CPU's kernels multiply in their own layout, panels.

If they do not support its form, or on a GPU without kernels, each GEMM dequantises the weight
(`dense`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Self, cast

import torch
from torch import Tensor

from minisgl.kernel.cpu import CpuOps
from minisgl.kernel.ops import Activation
from minisgl.quantization.parameter import TensorOwner
from minisgl.quantization.weight import Weight
from minisgl.utils.logger import get_logger
from minisgl_zoo.weights.panels import Panels

logger = get_logger(__name__)


class PanelledWeight(Weight):
    """A subclass writes `pack`, and a `dense` that unpacks the tensors if `panels` is set."""

    panels: Panels | None = None

    @property
    def has_kernel(self) -> bool:
        """Whether a kernel multiplies the quantised numbers."""
        return self.panels is not None

    @abstractmethod
    def pack(self, ops: CpuOps) -> Panels | None:
        """Pack the loaded tensors in place. Returns None if the CPU's kernels do not support
        them."""

    def init_buffers(self, device: torch.device) -> None:
        if self.ops.name == "cpu":
            self.panels = self.pack(cast("CpuOps", self.ops))

    def __getitem__(self, index: int) -> Self:
        matrix = super().__getitem__(index)
        if self.panels:
            matrix.panels = self.panels[index]
        return matrix

    def linear(
        self, x: Tensor, bias: Tensor | None = None, gate: Activation | None = None
    ) -> Tensor:
        if self.panels:
            return self.panels.linear(cast("CpuOps", self.ops), x, bias, gate)
        return super().linear(x, bias, gate)

    def logits(self, x_SD: Tensor) -> Tensor:
        if self.panels:
            return self.panels.logits(cast("CpuOps", self.ops), x_SD)
        return super().logits(x_SD)

    def norm_linear(
        self,
        x: Tensor,
        residual: Tensor | None,
        norm_weight: Tensor | None,
        eps: float,
        bias: Tensor | None,
        gate: Activation | None = None,
    ) -> tuple[Tensor, Tensor]:
        if not self.panels:
            return super().norm_linear(x, residual, norm_weight, eps, bias, gate)
        x, residual = self.ops.normed(x, residual, norm_weight, eps)
        return self.linear(x, bias, gate), residual


def log_kernels(model: TensorOwner, formats: Sequence[str]) -> None:
    """Log which of the model's weights are dequantised. formats: the names of its formats."""
    weights = [node for node in model.walk() if isinstance(node, PanelledWeight)]
    num_slow = sum(not weight.has_kernel for weight in weights)
    if num_slow:
        which = "" if num_slow == len(weights) else f"{num_slow} of {len(weights)} "
        logger.info(
            "%sweights in %s are dequantised in each GEMM: this saves memory and costs time",
            which,
            ", ".join(formats),
        )
