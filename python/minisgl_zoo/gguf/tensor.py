"""A tensor of a GGUF file: its type, its shape and its place."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
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
