"""The header of a GGUF file: its metadata, and the type, shape and place of each tensor.

The header is read in one pass, and no tensor is. (A vocabulary has hundreds of thousands of texts,
for each of which the package gguf makes several numpy arrays.) Each count is checked against the
file, so that a damaged file of a few hundred bytes cannot fill the memory.
Source of the layout: llama.cpp's specification (docs/gguf.md there), versions 2 and 3.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

import msgspec


@dataclass(frozen=True, slots=True)
class TensorType:
    """name: llama.cpp's. block: the numbers of a block, 1 if each number is for itself. num_bytes:
    of a block."""

    name: str
    block: int
    num_bytes: int


TYPES: Final = {
    number: TensorType(*about)
    for number, about in {
        0: ("F32", 1, 4), 1: ("F16", 1, 2), 28: ("F64", 1, 8), 30: ("BF16", 1, 2),
        24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8),
        2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24),
        8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 41: ("Q1_0", 128, 18),
        10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
        13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
        16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98),
        19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110),
        22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56),
        34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
        40: ("NVFP4", 64, 36),
    }.items()
}  # fmt: skip
"""Maps the number of a type in the files to the type, as the package gguf does."""
NUMPY: Final = {
    "F32": "<f4", "F16": "<f2", "F64": "<f8", "I8": "|i1", "I16": "<i2", "I32": "<i4", "I64": "<i8",
}  # fmt: skip
"""NumPy has the numbers of these types. Data of the others are bytes."""
TYPE_OF: Final = {each.name: each for each in TYPES.values()}


class StoredTensor(msgspec.Struct, frozen=True, kw_only=True):
    """kind: the name of a `TensorType`. shape: the file's, the last axis of numpy first. offset: of
    its first byte in the file. Raises ValueError for a shape that has no whole blocks."""

    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int

    def __post_init__(self) -> None:
        if self.kind not in TYPE_OF or not self.shape or self.shape[0] % self.type.block:
            raise ValueError(f"its tensor {self.name} is {self.kind} {list(self.shape)}")

    @property
    def type(self) -> TensorType:
        return TYPE_OF[self.kind]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) // self.type.block * self.type.num_bytes


@dataclass(frozen=True, slots=True)
class MappedTensor:
    """A tensor of a file that is memory-mapped. mapped: the file's bytes, uint8."""

    stored: StoredTensor
    mapped: Any

    @property
    def name(self) -> str:
        return self.stored.name

    @property
    def kind(self) -> str:
        return self.stored.kind

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    @property
    def data(self) -> Any:
        """A read-only view of the tensor, whose axes are numpy's. Where numpy does not have the
        numbers, it has their bytes, uint8."""
        stored = self.stored
        held = self.mapped[stored.offset : stored.offset + stored.num_bytes]
        *rows, _ = reversed(stored.shape)
        return held.view(NUMPY.get(stored.kind, "|u1")).reshape(*rows, -1)


SCALARS: Final = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
"""Maps the number of a value's type to its letter in `struct`."""
STRING: Final = 8
ARRAY: Final = 9
MAX_DIMENSIONS: Final = 4
"""llama.cpp gives a tensor at most so many dimensions."""
ALIGNMENT: Final = 32
"""Tensors begin at multiples of so many bytes, if the metadata do not say otherwise."""
_LENGTH: Final = struct.Struct("<Q")


def read_header(path: Path) -> tuple[dict[str, Any], list[StoredTensor]]:
    """Return the metadata and the tensors.

    Raises ValueError if the file is damaged or cut off, OSError if it cannot be read.
    """
    with path.open("rb") as file:
        if not path.stat().st_size:
            raise ValueError("the file is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).header()


class _Reader:
    """Mutable: its place in the file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def header(self) -> tuple[dict[str, Any], list[StoredTensor]]:
        if self._data[:4] != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        self._at = 4
        if (version := self._number("I")) not in (2, 3):
            raise ValueError(f"its version is {version}, expected 2 or 3, little-endian")
        num_tensors, num_values = self._number("Q"), self._number("Q")
        values: dict[str, Any] = {}
        for _ in range(num_values):  # each has bytes, so too high a count fails at the file's end
            key = self._text()
            if key in values:
                raise ValueError(f"it has {key} twice")
            values[key] = self._value(self._number("I"))
        found = [self._tensor() for _ in range(num_tensors)]
        alignment = values.get("general.alignment", ALIGNMENT)
        if type(alignment) is not int or alignment < 1:
            raise ValueError(f"general.alignment is {alignment!r}")
        begin = -(-self._at // alignment) * alignment
        tensors: dict[str, StoredTensor] = {}
        for name, kind, shape, offset in found:
            tensor = StoredTensor(name=name, kind=kind, shape=shape, offset=begin + offset)
            if name in tensors:
                raise ValueError(f"it has the tensor {name} twice")
            if (end := tensor.offset + tensor.num_bytes) > len(self._data):
                raise ValueError(
                    f"it ends after {len(self._data):,} bytes, and its tensor {name} would end at "
                    f"{end:,}"
                )
            tensors[name] = tensor
        return values, list(tensors.values())

    def _tensor(self) -> tuple[str, str, tuple[int, ...], int]:
        name, dimensions = self._text(), self._number("I")
        if dimensions > MAX_DIMENSIONS:
            raise ValueError(f"a tensor has {dimensions} dimensions")
        shape = self._numbers(f"{dimensions}Q")
        kind, offset = self._numbers("IQ")
        if kind not in TYPES:
            raise ValueError(f"its tensor {name} has the unknown type {kind}")
        return name, TYPES[kind].name, shape, offset

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._text()
        if kind != ARRAY:
            return self._number(self._letter(kind))
        kind, count = self._number("I"), self._number("Q")
        if kind == STRING:
            return self._texts(count)
        letter = self._letter(kind)
        if count > len(self._data):
            raise self._cut_off()
        return list(self._numbers(f"{count}{letter}"))

    def _letter(self, kind: int) -> str:
        if kind not in SCALARS:
            raise ValueError(f"a value has the type {kind}, which language models do not use")
        return SCALARS[kind]

    def _text(self) -> str:
        (text,) = self._texts(1)
        return text

    def _texts(self, count: int) -> list[str]:
        """Return texts one after another. A vocabulary's take most of the time of a header."""
        data, at, last = self._data, self._at, len(self._data) - _LENGTH.size
        length_at, found = _LENGTH.unpack_from, []
        for _ in range(count):
            if at > last:
                raise self._cut_off()
            (length,) = length_at(data, at)
            begin = at + 8
            at = begin + length
            found.append(data[begin:at])
        if at > len(data):
            raise self._cut_off()
        self._at = at
        return [text.decode() for text in found]

    def _number(self, letter: str) -> Any:
        (value,) = self._numbers(letter)
        return value

    def _numbers(self, form: str) -> tuple[Any, ...]:
        at, form = self._at, f"<{form}"
        self._at += struct.calcsize(form)
        if self._at > len(self._data):
            raise self._cut_off()
        return struct.unpack_from(form, self._data, at)

    def _cut_off(self) -> ValueError:
        return ValueError(f"it ends after {len(self._data):,} bytes, within its header")
