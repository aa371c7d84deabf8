"""Blocks of llama.cpp's formats as integers with scales and offsets.

value = number * scale * factor - step * zero::

    numbers  int4 or int8, one for each input
    scale    float16, of each block
    factor   int8, of each group of inputs in a block; absent where a block is one group
    step     float16, of each block; absent where the format has no offset
    zero     uint8, of each group; absent where a block is one group

Nothing is rounded: these are the file's numbers in another order. Sources of the layouts:
llama.cpp's specification and the package gguf. Axes: N blocks, B bytes of a block, I inputs of a
row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

Field = Literal["packed", "scale", "factor", "step", "zero"]
Read = Callable[[Tensor], Tensor]
"""Blocks uint8 [N, B] -> a field of each block, [N, ...]."""
PIECE: Final = 1 << 16
"""So many numbers are unpacked at a time, because intermediate tensors take some bytes for each."""
IQ4: Final = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""IQ4_NL and IQ4_XS store an index into these numbers (llama.cpp's `kvalues_iq4nl`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What blocks become in memory. Matrices of one form can be multiplied as one.

    block: inputs with one scale, and with one step. group: inputs with one factor, and with one
    zero.
    """

    kind: Literal["int4", "int8"]
    group: int
    block: int
    has_step: bool

    @property
    def has_factor(self) -> bool:
        return self.group < self.block

    @property
    def fields(self) -> tuple[Field, ...]:
        """The tensors of a matrix in this form."""
        names: list[Field] = ["packed", "scale"]
        names += ["factor"] if self.has_factor else []
        names += ["step"] if self.has_step else []
        names += ["zero"] if self.has_step and self.has_factor else []
        return tuple(names)

    def width(self, field: Field, inputs: int) -> int:
        """Entries in a row of the tensor `field`, for a row of so many inputs."""
        if field == "packed":
            return inputs // 2 if self.kind == "int4" else inputs
        return inputs // (self.block if field in ("scale", "step") else self.group)

    @property
    def bits(self) -> float:
        """Bits of memory for each weight, scales included."""
        a_block = sum(self.width(name, self.block) * DTYPES[name].itemsize for name in self.fields)
        return 8 * a_block / self.block


DTYPES: Final[Mapping[Field, torch.dtype]] = {
    "packed": torch.uint8,
    "scale": torch.float16,
    "factor": torch.int8,
    "step": torch.float16,
    "zero": torch.uint8,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A format of the files.

    num_bytes: of a block. numbers, factor, zero: read these fields; int4 numbers come as uint8 from
    0 to 15. scale, step: the offsets of these fields in a block, in bytes. adds: the file's step is
    added, so it is negated.
    """

    form: Form
    num_bytes: int
    numbers: Read
    scale: int
    factor: Read | None = None
    step: int | None = None
    adds: bool = False
    zero: Read | None = None

    def read(self, rows: Tensor, field: Field) -> Tensor:
        """Rows of blocks, uint8 [O, N * B] -> one field of all rows, [O, width]."""
        inputs = rows.shape[1] // self.num_bytes * self.form.block
        shape = (len(rows), self.form.width(field, inputs))
        made = torch.empty(shape, dtype=DTYPES[field], device=rows.device)
        if rows.is_meta:
            return made
        height = max(PIECE // max(inputs, 1), 1)
        for first in range(0, len(rows), height):
            piece = rows[first : first + height]
            blocks = piece.reshape(-1, self.num_bytes)
            made[first : first + height] = self._field(blocks, field).reshape(len(piece), -1)
        return made

    def _field(self, blocks: Tensor, field: Field) -> Tensor:
        if field == "packed":
            numbers = self.numbers(blocks)
            if self.form.kind == "int8":
                return numbers.view(torch.uint8)
            return numbers[:, ::2] | numbers[:, 1::2] << 4
        if field in ("scale", "step"):
            at = self.scale if field == "scale" else self.step
            assert at is not None
            halves = blocks[:, at : at + 2].contiguous().view(torch.float16)
            return -halves if field == "step" and self.adds else halves
        read = self.factor if field == "factor" else self.zero
        assert read
        return read(blocks)


def _nibbles(packed: Tensor) -> Tensor:
    """[N, bytes] -> [N, 2 * bytes]: the low halves of all bytes, then the high halves."""
    return torch.cat((packed & 15, packed >> 4), 1)


def _bits(packed: Tensor, count: int, width: int) -> Tensor:
    """Cut each byte into `count` numbers of `width` bits, the low bits first: [N, bytes] -> [N,
    count, bytes]."""
    shifts = torch.arange(0, count * width, width, dtype=torch.uint8)
    return packed[:, None] >> shifts[:, None] & (1 << width) - 1


def _fifth(high: Tensor) -> Tensor:
    """The fifth bit of each number: uint8 [N, 4] -> [N, 32], each 16 or 0."""
    return _bits(high, 8, 1).transpose(1, 2).flatten(1) << 4


def _q5(blocks: Tensor, at: int) -> Tensor:
    return _nibbles(blocks[:, at + 4 :]) | _fifth(blocks[:, at : at + 4])


def _q2(blocks: Tensor) -> Tensor:
    """In each half of a block, 32 bytes hold four runs of 32 numbers."""
    return _bits(blocks[:, 16:80].reshape(-1, 32), 4, 2).reshape(-1, 256)


def _q3(blocks: Tensor) -> Tensor:
    low = _bits(blocks[:, 32:96].reshape(-1, 32), 4, 2).reshape(-1, 256)
    high = _bits(blocks[:, :32], 8, 1).reshape(-1, 256)
    return (low | high << 2) + 4  # the file stores 0 as 4, int4 stores it as 8


def _q3_factors(blocks: Tensor) -> Tensor:
    low = _nibbles(blocks[:, 96:104])
    high = _bits(blocks[:, 104:108], 4, 2).flatten(1)
    return (low | high << 4).view(torch.int8) - 32


def _in_fours(packed: Tensor) -> Tensor:
    """In each run of 32 bytes, the low halves come before the high halves: [N, 128] -> [N, 256]."""
    return _nibbles(packed.reshape(-1, 32)).reshape(-1, 256)


def _k_factors(blocks: Tensor) -> Tensor:
    """Factors of 6 bits: the first four lie in one byte each, the others in parts of two bytes."""
    first, rest = blocks[:, 4:8], blocks[:, 12:16]
    return torch.cat((first & 63, rest & 15 | first >> 6 << 4), 1).view(torch.int8)


def _k_zeros(blocks: Tensor) -> Tensor:
    second, rest = blocks[:, 8:12], blocks[:, 12:16]
    return torch.cat((second & 63, rest >> 4 | second >> 6 << 4), 1)


def _q5_k(blocks: Tensor) -> Tensor:
    return _in_fours(blocks[:, 48:]) | _bits(blocks[:, 16:48], 8, 1).reshape(-1, 256) << 4


def _q6_k(blocks: Tensor) -> Tensor:
    low = _nibbles(blocks[:, :128].reshape(-1, 64)).reshape(-1, 256)
    high = _bits(blocks[:, 128:192].reshape(-1, 32), 4, 2).reshape(-1, 256)
    return (low | high << 4).view(torch.int8) - 32


def _iq4(nibbles: Tensor) -> Tensor:
    return torch.tensor(IQ4, dtype=torch.int8)[nibbles.int()]


def _iq4_xs(blocks: Tensor) -> Tensor:
    return _iq4(_nibbles(blocks[:, 8:].reshape(-1, 16)).reshape(-1, 256))


def _iq4_xs_factors(blocks: Tensor) -> Tensor:
    low = _bits(blocks[:, 4:8], 2, 4).transpose(1, 2).flatten(1)
    high = _bits(blocks[:, 2:4], 4, 2).transpose(1, 2).flatten(1)
    return (low | high << 4).view(torch.int8) - 32


def _form(kind: Literal["int4", "int8"], group: int, block: int, *, has_step: bool = False) -> Form:
    return Form(kind=kind, group=group, block=block, has_step=has_step)


LAYOUTS: Final[Mapping[str, Layout]] = {
    "Q4_0": Layout(
        form=_form("int4", 32, 32), num_bytes=18, scale=0, numbers=lambda b: _nibbles(b[:, 2:])
    ),
    "Q4_1": Layout(
        form=_form("int4", 32, 32, has_step=True), num_bytes=20, scale=0, step=2, adds=True,
        numbers=lambda b: _nibbles(b[:, 4:]),
    ),
    "Q5_0": Layout(
        form=_form("int8", 32, 32), num_bytes=22, scale=0,
        numbers=lambda b: _q5(b, 2).view(torch.int8) - 16,
    ),
    "Q5_1": Layout(
        form=_form("int8", 32, 32, has_step=True), num_bytes=24, scale=0, step=2, adds=True,
        numbers=lambda b: _q5(b, 4).view(torch.int8),
    ),
    "Q8_0": Layout(
        form=_form("int8", 32, 32), num_bytes=34, scale=0,
        numbers=lambda b: b[:, 2:].contiguous().view(torch.int8),
    ),
    "Q2_K": Layout(
        form=_form("int4", 16, 256, has_step=True), num_bytes=84, scale=80, step=82, numbers=_q2,
        factor=lambda b: (b[:, :16] & 15).view(torch.int8), zero=lambda b: b[:, :16] >> 4,
    ),
    "Q3_K": Layout(
        form=_form("int4", 16, 256), num_bytes=110, scale=108, numbers=_q3, factor=_q3_factors
    ),
    "Q4_K": Layout(
        form=_form("int4", 32, 256, has_step=True), num_bytes=144, scale=0, step=2,
        numbers=lambda b: _in_fours(b[:, 16:]), factor=_k_factors, zero=_k_zeros,
    ),
    "Q5_K": Layout(
        form=_form("int8", 32, 256, has_step=True), num_bytes=176, scale=0, step=2,
        numbers=lambda b: _q5_k(b).view(torch.int8), factor=_k_factors, zero=_k_zeros,
    ),
    "Q6_K": Layout(
        form=_form("int8", 16, 256), num_bytes=210, scale=208, numbers=_q6_k,
        factor=lambda b: b[:, 192:208].contiguous().view(torch.int8),
    ),
    "IQ4_NL": Layout(
        form=_form("int8", 32, 32), num_bytes=18, scale=0,
        numbers=lambda b: _iq4(_nibbles(b[:, 2:])),
    ),
    "IQ4_XS": Layout(
        form=_form("int8", 32, 256), num_bytes=136, scale=0, numbers=_iq4_xs,
        factor=_iq4_xs_factors,
    ),
}  # fmt: skip
"""Maps llama.cpp's name of a format to its layout."""
