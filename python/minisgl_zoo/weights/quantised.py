"""A quantised weight that kernels multiply in its format, in the layout that they read.

A subclass writes `pack` for the CPU's kernels, which have panels, and `packed_form` for a GPU's. If
these return None, or if no package has kernels for the device, each GEMM dequantises the weight.

Axes: L matrices of a stack, F outputs, D inputs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, Self, cast

import torch
from torch import Tensor

from minisgl import plugins
from minisgl.kernel.cpu import CpuOps
from minisgl.kernel.ops import Activation, Ops
from minisgl.quantization.parameter import TensorOwner
from minisgl.quantization.weight import Weight
from minisgl.utils.logger import get_logger
from minisgl_zoo.weights.panels import Panels

logger = get_logger(__name__)

Kind = Literal["fp8", "int8", "uint8", "int4", "fp4"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A matrix [F, D] or a stack [L, F, D]: value = (number - zero) * scale * outer.

    numbers: [..., F, D] of 8 bits, or words int32 [..., F, D / 8]. group: the inputs with one
    scale, a power of 2; 0 if there are only outer scales. rows: the outputs with one scale. scale:
    [..., F / rows, D / group], float32, bfloat16, float16 or fp8; or uint8, which is an exponent +
    127. zero: uint8 [..., F, D / group]; None if all zeros are `middle`. outer: float32 [..., F] or
    None.
    """

    kind: Kind
    numbers: Tensor
    group: int = 0
    rows: int = 1
    scale: Tensor | None = None
    zero: Tensor | None = None
    middle: int = 0
    outer: Tensor | None = None

    @property
    def is_4_bit(self) -> bool:
        return self.kind in ("int4", "fp4")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the decoded numbers, [..., F, D]."""
        *others, columns = self.numbers.shape
        return (*others, columns * (8 if self.is_4_bit else 1))

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """numbers, scale, zero and outer. The numbers take the place of those that are None."""
        others = (self.scale, self.zero, self.outer)
        scale, zero, outer = (self.numbers if x is None else x for x in others)
        return self.numbers, scale, zero, outer

    @property
    def key(self) -> tuple[torch.dtype, torch.dtype]:
        """The dtypes of the numbers and the scales. Each pair has its own compiled kernels."""
        return self.numbers.dtype, self.tensors[1].dtype


class Gemms(Protocol):
    """The GEMMs by one matrix: the row "packed" of the table `ops`."""

    def __init__(self, ops: Ops, weight: Packed, dtype: torch.dtype) -> None:
        """dtype: of the activations, 16 bits."""

    @staticmethod
    def reads(weight: Packed) -> bool:
        """Return whether the device has kernels for this matrix or stack."""

    def quantises(self, rows: int) -> bool:
        """Return whether activations are rounded, so that `gated_linear` does it after the gate."""

    def linear(self, x: Tensor, bias: Tensor | None, gate: Activation | None) -> Tensor:
        """See `Ops.linear`."""

    def logits(self, x_SD: Tensor) -> Tensor:
        """See `Ops.logits`."""

    def gated_linear(self, x_MG: Tensor, gate: Activation, bias: Tensor | None) -> Tensor:
        """Return `linear` of `Ops.gated(x_MG, gate)`. Requires that `quantises`."""

    def norm_linear(
        self, x: Tensor, residual: Tensor | None, norm_weight: Tensor | None, eps: float,
        bias: Tensor | None, gate: Activation | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """See `Ops.norm_linear`."""


class QuantisedWeight(Weight):
    """A subclass writes a `dense` that unpacks the tensors if `panels` is set."""

    panels: Panels | None = None
    _kernels: Gemms | None = None
    packed_stack: Packed | None = None
    """Set instead of `_kernels` if this is a stack of experts, which `minisgl.moe` multiplies."""

    @abstractmethod
    def pack(self, ops: CpuOps) -> Panels | None:
        """Pack the loaded tensors in place. Returns None if the CPU's kernels do not support
        them."""

    def packed_form(self) -> Packed | None:
        """The loaded tensors for a GPU's kernels, or None if they cannot read this weight."""
        return None

    @property
    def has_kernel(self) -> bool:
        """Whether a kernel multiplies the quantised numbers."""
        return bool(self.panels or self._kernels or self.packed_stack)

    def init_buffers(self, device: torch.device) -> None:
        if self.ops.name == "cpu":
            self.panels = self.pack(cast("CpuOps", self.ops))
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
        if self._kernels:
            return self._kernels.linear(x, bias, gate)
        return super().linear(x, bias, gate)

    def logits(self, x_SD: Tensor) -> Tensor:
        if self.panels:
            return self.panels.logits(cast("CpuOps", self.ops), x_SD)
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


def log_kernels(model: TensorOwner, formats: Sequence[str]) -> None:
    """Log which of the model's weights are dequantised. formats: the names of its formats."""
    weights = [node for node in model.walk() if isinstance(node, QuantisedWeight)]
    num_slow = sum(not weight.has_kernel for weight in weights)
    if num_slow:
        which = "" if num_slow == len(weights) else f"{num_slow} of {len(weights)} "
        logger.info(
            "%sweights in %s are dequantised in each GEMM: this saves memory and costs time",
            which,
            ", ".join(formats),
        )


def is_size(inputs: int, group: int, *, is_4_bit: bool) -> bool:
    """Whether the kernels read rows of so many inputs with a scale for each `group` of them (0: one
    scale for all)."""
    least = 16 if is_4_bit else 32
    is_group = group == 0 or (group >= least and group & (group - 1) == 0)
    chunk = min(32, group or 32) if is_4_bit else 16
    return is_group and inputs % chunk == 0


def exact_16_bit(scale: Tensor) -> Tensor:
    """The scales in bfloat16, which more kernels read, or in float16, if this changes none of them;
    else as they are."""
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(scale.to(dtype).float(), scale.float()):
            return scale.to(dtype)
    return scale
