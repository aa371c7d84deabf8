"""Integers of 4 or 8 bits with a scale, and perhaps a zero point, for each group of inputs.

value = (number - zero) * scale. Files differ; in memory all formats have this layout::

    packed       [O, I * bits / 8] uint8   4 bits: the number of the even column in the low bits
    scale        [O, groups] float32
    zero         [O, groups] uint8         absent where it is the middle of the range
    input_group  [matrices, I] int32       absent where groups are in order

Only with act-order (GPTQ's order of importance) are groups out of order. Each rank then holds all
scales.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from minisgl.kernel.cpu import CpuOps
from minisgl.quantization.parameter import Part
from minisgl.quantization.weight import WeightBuild
from minisgl_zoo.weights.cut import Unit, local_rows, per_unit
from minisgl_zoo.weights.panels import (
    Kind,
    Panels,
    pack_bytes,
    pack_nibbles,
    pack_rows,
    takes,
    unpack_bytes,
    unpack_nibbles,
    unpack_rows,
)
from minisgl_zoo.weights.quantised import Packed, QuantisedWeight, exact_16_bit, is_size

Spelling = Literal["compressed-tensors", "awq", "gptq", "gptq_v2"]
UNREAD = ("weight_shape", "g_idx", "weight_g_idx")
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place of each of 8 columns in AWQ's 32 bits, counted from the low bits in steps of 4."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouped:
    """Makes the weights of this format.

    group: inputs of a group; `cut.ALL` means one group for each row. has_zero: the files hold zero
    points. act_order: the files hold the group of each input, and groups may be out of order.
    """

    spelling: Spelling
    bits: int
    group: int
    has_zero: bool
    act_order: bool

    def __call__(self, build: WeightBuild) -> GroupedWeight:
        return GroupedWeight(build, self)


class GroupedWeight(QuantisedWeight):
    """A checkpoint holds, by spelling, 32 bits of numbers in an int32:

    - compressed-tensors: NAME.weight_packed [O, I / 8], NAME.weight_scale [O, groups],
      NAME.weight_zero_point [O / 8, groups], NAME.weight_g_idx [I].
    - awq: NAME.qweight [I, O / 8], NAME.scales [groups, O], NAME.qzeros [groups, O / 8].
    - gptq: NAME.qweight [I / 8, O], NAME.scales and NAME.qzeros as in awq, NAME.g_idx [I]. Version
      1 stores zero - 1.
    """

    packed: Tensor
    scale: Tensor
    zero: Tensor | None = None
    input_group: Tensor | None = None

    def __init__(self, build: WeightBuild, kind: Grouped) -> None:
        super().__init__(build)
        parts, rows, stacked = build.parts, build.rows, build.stacked
        self._kind, self._rows = kind, local_rows(parts, stacked)
        held = (part.local_shape[1] for part in parts if part.share)
        self._columns = next(held, parts[0].shape[1])
        each = 32 // kind.bits
        packed, scales, zeros, input_groups = [], [], [], []
        for part in parts:
            # With act-order, the inputs of a rank may belong to any group.
            whole = replace(part, axis=0, share=range(part.shape[0] if part.share else 0))
            scaled = whole if kind.act_order and part.axis == 1 else part
            group: Unit = (1, kind.group)
            zero_group: Unit = (each, kind.group)
            if kind.spelling == "compressed-tensors":
                numbers = per_unit(
                    part, "weight_packed", (1, each), stored=torch.int32, rearrange=_bytes,
                    unread=UNREAD,
                )  # fmt: skip
                scale = per_unit(scaled, "weight_scale", group)
                count = scaled.local_shape[0]
                unpack = partial(_packed_rows, bits=kind.bits, count=count)
                zero = per_unit(
                    scaled, "weight_zero_point", zero_group, stored=torch.int32, rearrange=unpack
                )
                index = "weight_g_idx"
            else:
                unit = (each, 1) if kind.spelling == "awq" else (1, each)
                read = _awq_numbers if kind.spelling == "awq" else _gptq_numbers
                numbers = per_unit(
                    part, "qweight", unit, transposed=True, stored=torch.int32, rearrange=read,
                    unread=(*UNREAD, "qzeros"),
                )  # fmt: skip
                scale = per_unit(
                    scaled, "scales", group, transposed=True, stored=torch.float32,
                    rearrange=torch.t,
                )  # fmt: skip
                zero = per_unit(
                    scaled, "qzeros", zero_group, transposed=True, stored=torch.int32,
                    rearrange=partial(_zeros, bits=kind.bits, spelling=kind.spelling),
                )  # fmt: skip
                index = "g_idx"
            packed.append(numbers)
            scales.append(scale)
            zeros.append(zero)
            input_groups.append(_input_group(part, index))
        self.declare("packed", torch.uint8, *packed, rows=rows, stacked=stacked)
        self.declare("scale", torch.float32, *scales, rows=rows, stacked=stacked)
        if kind.has_zero:
            self.declare("zero", torch.uint8, *zeros, rows=rows, stacked=stacked)
        if kind.act_order:
            self.declare("input_group", torch.int32, *input_groups, stacked=stacked)

    def dense(self) -> Tensor:
        numbers, scale, zeros = self.packed, self.scale, self.zero
        if self.panels:
            numbers, scale, zeros = self._unpacked()
        if self._kind.bits == 4:
            numbers = torch.stack((numbers & 15, numbers >> 4), -1).flatten(-2)
        numbers = numbers[..., : self._columns]
        zero = self._middle if zeros is None else self._spread(zeros)
        return ((numbers.float() - zero) * self._spread(scale)).to(self.dtype)

    @property
    def _middle(self) -> int:
        return 1 << (self._kind.bits - 1)

    def _unpacked(self) -> tuple[Tensor, Tensor, Tensor | None]:
        if self._kind.bits == 4:
            numbers = unpack_nibbles(self.packed, offset=self._middle)
        else:
            numbers = unpack_bytes(self.packed, "int8") ^ self._middle
        zeros = None if self.zero is None else unpack_rows(self.zero)
        return numbers, unpack_rows(self.scale), zeros

    def pack(self, ops: CpuOps) -> Panels | None:
        kind: Kind = "int4" if self._kind.bits == 4 else "int8"
        outputs, group = self.packed.shape[-2], self._kind.group
        if self.input_group is not None or not takes(
            outputs, self._columns, group, self.dtype, kind
        ):
            return None
        if kind == "int4":
            pack_nibbles(ops, self.packed, offset=self._middle)
        else:
            self.packed ^= self._middle
            pack_bytes(ops, self.packed, kind)
        pack_rows(ops, self.scale)
        if self.zero is not None:
            pack_rows(ops, self.zero)
        return Panels(
            kind=kind, numbers=self.packed, group=group or self._columns, scales=self.scale,
            zeros=self.zero, middle=self._middle, outputs=outputs, inputs=self._columns,
        )  # fmt: skip

    def packed_form(self) -> Packed | None:
        is_4_bit = self._kind.bits == 4
        group = self._kind.group
        if self.input_group is not None or not is_size(self._columns, group, is_4_bit=is_4_bit):
            return None
        if group == 0 and self.zero is not None:
            return None  # zero points of whole rows
        self.scale = exact_16_bit(self.scale)
        return Packed(
            kind="int4" if is_4_bit else "uint8",
            numbers=self.packed.view(torch.int32) if is_4_bit else self.packed,
            group=group,
            scale=self.scale if group else None,
            outer=None if group else self.scale[..., 0].float().contiguous(),
            zero=self.zero,
            middle=self._middle,
        )

    def _spread(self, values: Tensor) -> Tensor:
        """Repeat a value of each group for its inputs: [..., O, groups] -> [..., O, I] (or [..., O,
        1] where a row is one group)."""
        if self.input_group is None:
            if not self._kind.group:
                return values
            return values.repeat_interleave(self._kind.group, -1)[..., : self._columns]
        padding = values.shape[-2] - sum(self._rows)
        parts = torch.split(values, [*self._rows, padding], -2)
        columns = [
            torch.take_along_dim(part, group[..., None, :].long(), -1)
            for part, group in zip(parts, self.input_group.unbind(-2), strict=False)
        ]
        zeros = values.new_zeros(*values.shape[:-2], padding, self._columns)
        return torch.cat([*columns, zeros], -2)


def _input_group(part: Part, name: str) -> Part:
    """The group of each input that this rank holds, as one row."""
    columns = range(part.shape[1]) if part.axis == 0 else part.share
    return Part(
        name=f"{part.module}.{name}",
        shape=part.shape[1:],
        axis=0,
        share=columns if part.share else range(0),
        stored=torch.int32,
        rearrange=partial(_row, columns=len(columns)),
    )


def _row(numbers: Tensor, columns: int) -> Tensor:
    return numbers.reshape(-1, columns)


def _bytes(packed: Tensor) -> Tensor:
    """int32 [O, n] -> uint8 [O, 4 n], the low bits first."""
    return packed.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def _unpack(packed: Tensor, bits: int) -> Tensor:
    """int32 [n, m] -> uint8 [n, m * 32 / bits], the low bits first."""
    numbers = _bytes(packed)
    if bits != 4:
        return numbers
    if packed.is_meta:  # only the shape counts; `stack` would import sympy and torch's compiler
        return numbers.new_empty(*numbers.shape[:-1], 2 * numbers.shape[-1])
    return torch.stack((numbers & 15, numbers >> 4), -1).flatten(-2)


def _packed_rows(packed: Tensor, bits: int, count: int) -> Tensor:
    """int32 [O / 8, groups], packed along O -> uint8 [`count`, groups]."""
    return _unpack(packed.t(), bits).t()[:count]


def _awq_order(packed: Tensor) -> Tensor:
    """int32 [n, m / 8] -> uint8 [n, m], a number each, in the order of the columns."""
    numbers = _unpack(packed, 4)
    if packed.is_meta:
        return numbers
    order = [8 * (column // 8) + AWQ_ORDER[column % 8] for column in range(numbers.shape[1])]
    return numbers[:, torch.tensor(order, dtype=torch.long, device=numbers.device)]


def _awq_numbers(packed: Tensor) -> Tensor:
    """int32 [I, O / 8] -> uint8 [O, I / 2]."""
    numbers = _awq_order(packed).t()
    return numbers[:, ::2] if packed.is_meta else numbers[:, ::2] | numbers[:, 1::2] << 4


def _gptq_numbers(packed: Tensor) -> Tensor:
    """int32 [I / 8, O] -> uint8 [O, I / 2] (or [O, I])."""
    return _bytes(packed.t())


def _zeros(packed: Tensor, bits: int, spelling: Spelling) -> Tensor:
    """int32 [groups, O / 8] -> uint8 [O, groups]."""
    if spelling == "awq":
        return _awq_order(packed).t()
    zeros = _unpack(packed, bits).t()
    if spelling != "gptq" or packed.is_meta:
        return zeros
    return (zeros + 1) & ((1 << bits) - 1)
