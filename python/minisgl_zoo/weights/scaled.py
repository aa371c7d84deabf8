"""Numbers of 8 bits with a float32 scale for each unit of the matrix: value = number * scale.

The numbers are fp8 (e4m3, Micikevicius et al. 2022) or int8. The unit is the matrix, a row (an
output channel) or a block; the last block of a row or column may be smaller::

    unit        tensor [O, I]                        scale
    matrix      |===== q =====|= k =|= v =|          [3], one for each merged matrix
    row                                              [O, 1]
    128 x 128                                        [O / 128, I / 128], of each matrix rounded up

Activations stay in the model's dtype, so a static input scale is not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from minisgl.kernel.cpu import CpuOps
from minisgl.quantization.weight import WeightBuild
from minisgl_zoo.weights.cut import ALL, Unit, entries, local_rows, per_unit
from minisgl_zoo.weights.panels import Kind, Panels, pack_bytes, pack_rows, takes, unpack_bytes
from minisgl_zoo.weights.quantised import Packed, QuantisedWeight, is_size

UNREAD = ("input_scale", "activation_scale", "input_scale_ub", "k_scale", "v_scale")
"""Scales of activations, which stay in the model's dtype, and of an fp8 KV cache, which
`minisgl_zoo.kv8.scales` reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    """Makes the weights of this format.

    number: dtype of the numbers. unit: rows and columns with one scale. flat: the file stores the
    scales as a vector (it always does if the unit is the whole matrix).
    """

    number: torch.dtype
    unit: Unit
    flat: bool = False

    def __call__(self, build: WeightBuild) -> ScaledWeight:
        return ScaledWeight(build, self)


class ScaledWeight(QuantisedWeight):
    """A checkpoint holds NAME.weight, NAME.weight_scale (DeepSeek and transformers call it
    NAME.weight_scale_inv) and perhaps a static input scale."""

    tensor: Tensor
    scale: Tensor

    def __init__(self, build: WeightBuild, kind: Scaled) -> None:
        super().__init__(build)
        parts, rows, stacked = build.parts, build.rows, build.stacked
        # Files with one tensor for all experts would have one for all scales; no released file has.
        matrices = [replace(part, stack=None) for part in parts]
        self.declare("tensor", kind.number, *matrices, rows=rows, stacked=stacked)
        self.declare(
            "scale",
            torch.float32,
            *(
                per_unit(
                    part,
                    "weight_scale",
                    kind.unit,
                    alias="weight_scale_inv",
                    flat=kind.flat or kind.unit == (ALL, ALL),
                    unread=UNREAD,
                )
                for part in parts
            ),
            stacked=stacked,
        )
        self._unit, self._rows = kind.unit, local_rows(parts, stacked)

    def dense(self) -> Tensor:
        numbers = self.tensor
        if self.panels:
            numbers = unpack_bytes(numbers, self.panels.kind)
        scale = spread(self.scale, numbers.shape, self._rows, self._unit)
        return (numbers.float() * scale).to(self.dtype)

    def pack(self, ops: CpuOps) -> Panels | None:
        kind: Kind = "int8" if self.tensor.dtype == torch.int8 else "fp8"
        outputs, inputs = self.tensor.shape[-2:]
        height, group = self._unit
        if not takes(outputs, inputs, group, self.dtype, kind):
            return None
        shape = (*self.tensor.shape[:-1], -(-inputs // (group or inputs)))
        scales = spread(self.scale, shape, self._rows, (height, 1 if group else ALL)).contiguous()
        pack_rows(ops, scales)
        pack_bytes(ops, self.tensor, kind)
        return Panels(
            kind=kind, numbers=self.tensor, group=group or inputs, scales=scales, zeros=None,
            middle=0, outputs=outputs, inputs=inputs,
        )  # fmt: skip

    def packed_form(self) -> Packed | None:
        inputs, (height, width) = self.tensor.shape[-1], self._unit
        group = 0 if width in (ALL, inputs) else width
        if not is_size(inputs, group, is_4_bit=False):
            return None
        kind: Literal["fp8", "int8"] = "int8" if self.tensor.dtype == torch.int8 else "fp8"
        # If each merged matrix has whole blocks, the scales stay as they are. Else each row gets
        # its own.
        is_block = group and height and not any(rows % height for rows in self._rows)
        if is_block and sum(self._rows) == self.tensor.shape[-2]:
            shape = (*self.tensor.shape[:-2], self.tensor.shape[-2] // height, -(-inputs // group))
            scale = self.scale.view(shape)
            return Packed(kind=kind, numbers=self.tensor, group=group, rows=height, scale=scale)
        groups = -(-inputs // group) if group else 1
        shape = (*self.tensor.shape[:-1], groups)
        unit = (height, 1 if group else ALL)
        scale = spread(self.scale, shape, self._rows, unit).contiguous()
        if group:
            return Packed(kind=kind, numbers=self.tensor, group=group, scale=scale)
        return Packed(kind=kind, numbers=self.tensor, outer=scale[..., 0].contiguous())


def spread(scale: Tensor, shape: Sequence[int], rows: Sequence[int], unit: Unit) -> Tensor:
    """Repeat scales over their units, so that they can be multiplied with numbers of `shape`,
    [..., O, I].

    rows: how many each merged matrix has; their scales follow one another. Further rows are padding
    and get 0. Returns [..., O, I], or [..., O, 1] if a unit has whole rows.
    """
    columns = shape[-1]
    counts = [entries((count, columns), unit) for count in rows]
    width = entries((0, columns), unit)[1]
    scale = scale.reshape(*shape[:-2], sum(count for count, _ in counts), width)
    parts = torch.split(scale, [count for count, _ in counts], -2)
    pieces = [
        part.repeat_interleave(unit[0] or count, -2)[..., :count, :]
        for count, part in zip(rows, parts, strict=True)
    ]
    pieces.append(scale.new_zeros(*shape[:-2], shape[-2] - sum(rows), width))
    whole = torch.cat(pieces, -2)
    return whole.repeat_interleave(unit[1], -1)[..., :columns] if unit[1] else whole
