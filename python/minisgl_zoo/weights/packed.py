"""A weight in the layout that GPU kernels read, and what they compute with it.

Axes: L matrices of a stack, F outputs, D inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from minisgl.kernel.ops import Activation, Ops

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
