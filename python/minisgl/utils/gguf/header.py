"""Checks that the counts in a GGUF file's header fit the file, before the package gguf reads it.

The package trusts each count. With a damaged file of a few hundred bytes it could work without end
and fill the memory. Source of the layout: llama.cpp's specification (docs/gguf.md there), versions
2 and 3.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Final

SIZES: Final = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Number of a type -> the bytes of a value."""
STRING: Final = 8
ARRAY: Final = 9
MAX_DIMENSIONS: Final = 4
"""The most dimensions that llama.cpp gives a tensor."""


def check_header(path: Path) -> None:
    """Raise ValueError if the header is cut off or a count exceeds the file, OSError if the file
    cannot be read."""
    with path.open("rb") as file:
        if not path.stat().st_size:
            raise ValueError("the file is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            _Walk(data).header()


class _Walk:
    """A walk over the header. Mutable: its place in the file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def header(self) -> None:
        if self._data[:4] != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        self._at = 4
        if (version := self._number("<I")) not in (2, 3):
            raise ValueError(f"its version is {version}, expected 2 or 3, little-endian")
        num_tensors, num_values = self._number("<Q"), self._number("<Q")
        for _ in range(num_values):  # each has bytes, so too high a count fails at the file's end
            self._string()
            self._value(self._number("<I"))
        for _ in range(num_tensors):
            self._string()
            if (dimensions := self._number("<I")) > MAX_DIMENSIONS:
                raise ValueError(f"a tensor has {dimensions} dimensions")
            self._skip(8 * dimensions + 4 + 8)

    def _value(self, kind: int) -> None:
        if kind == STRING:
            self._string()
        elif kind == ARRAY:
            kind, length = self._number("<I"), self._number("<Q")
            if kind == STRING:
                for _ in range(length):
                    self._string()
            else:
                self._skip(length * self._size(kind))
        else:
            self._skip(self._size(kind))

    def _size(self, kind: int) -> int:
        if kind not in SIZES:
            raise ValueError(f"a value has the type {kind}, which language models do not use")
        return SIZES[kind]

    def _string(self) -> None:
        self._skip(self._number("<Q"))

    def _number(self, form: str) -> int:
        at = self._at
        self._skip(struct.calcsize(form))
        (value,) = struct.unpack_from(form, self._data, at)
        return int(value)

    def _skip(self, num_bytes: int) -> None:
        self._at += num_bytes
        if self._at > len(self._data):
            raise ValueError(f"it ends after {len(self._data)} bytes, within its header")
