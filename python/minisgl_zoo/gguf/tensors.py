"""Memory-mapped tensors of a GGUF file, which are indexed like slices of safetensors.

Axes: E experts, O outputs, I inputs; N heads, K dims of a key, V of a value, L of a latent.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from minisgl_zoo.gguf.header import NUMPY, TYPE_OF

Index = tuple[int | slice, ...]
Change = Callable[[Tensor], Tensor]
SMALL: Final = 1 << 16
"""A norm or vector has at most so many numbers; shapes of larger tensors are computed on `meta`."""
MX_BYTES: Final = 17
"""A block of 32 numbers of MXFP4 has so many bytes: the exponent, then 4 bits for each of the
numbers 0 and 16, 1 and 17, ..., the first of a pair in the low bits."""


class Slice(ABC):
    """dtype: its name in safetensors."""

    dtype = "F32"

    def get_slice(self, name: str) -> Slice:
        return self

    def get_dtype(self) -> str:
        return self.dtype

    @abstractmethod
    def get_shape(self) -> list[int]: ...

    @abstractmethod
    def __getitem__(self, index: Index) -> Tensor: ...


class Dequantised(Slice):
    """A tensor that is dequantised to float32 when it is indexed."""

    def __init__(self, data: Any, kind: str, change: Change | None = None) -> None:
        """data: numbers, or rows of blocks. kind: the name of its type. change: see
        `minisgl_zoo.gguf.changes.change_of`."""
        self._data, self._change = data, change
        self._type = TYPE_OF[kind]

    def get_shape(self) -> list[int]:
        columns = self._data.nbytes // max(prod(self._data.shape[:-1]) * self._type.num_bytes, 1)
        shape = [*self._data.shape[:-1], columns * self._type.block]
        if self._change is None:
            return shape
        # Arithmetic on `meta` imports sympy, which takes 1 s. Only small tensors need arithmetic.
        device = "cpu" if prod(shape) <= SMALL else "meta"
        return list(self._change(torch.empty(shape, device=device)).shape)

    def __getitem__(self, index: Index) -> Tensor:
        """index: a slice for each axis, or a number for the first one.

        Dequantises only the rows that are asked for, and cuts columns after that. If there is a
        change, it dequantises the whole tensor.
        """
        if self._change is not None:
            return self._change(self._values(self._data))[index]
        *rows, columns = index
        if self._data.ndim == 1:
            return self._values(self._data)[columns]
        return self._values(self._data[tuple(rows)])[..., columns]

    def _values(self, data: Any) -> Tensor:
        if self._type.name == "BF16":
            data = (data.view("<u2").astype("<u4") << 16).view("<f4")
        elif self._type.name not in NUMPY:
            from gguf import GGMLQuantizationType, quants  # imports much, and few files need it

            data = quants.dequantize(data, GGMLQuantizationType[self._type.name])
        values = np.ascontiguousarray(data, dtype=np.float32)
        return torch.from_numpy(values if values.flags.writeable else values.copy())


class LatentHeads(Slice):
    """W_k and W_v of all heads (`minisgl_zoo.blocks.latent_attention`) as one matrix [N * (K + V),
    L]. keys: [N, L, K]. values: [N, V, L]."""

    def __init__(self, keys: Dequantised, values: Dequantised) -> None:
        self._keys, self._values = keys, values

    def get_shape(self) -> list[int]:
        heads, latent, key_size = self._keys.get_shape()
        return [heads * (key_size + self._values.get_shape()[1]), latent]

    def __getitem__(self, index: Index) -> Tensor:
        whole = (slice(None),) * 3
        keys_NKL, values_NVL = self._keys[whole].transpose(1, 2), self._values[whole]
        return torch.cat((keys_NKL, values_NVL), 1).flatten(0, 1)[index]


class Blocks(Slice):
    """The blocks of a matrix as the file has them, uint8 [O, bytes]."""

    dtype = "U8"

    def __init__(self, data: Any, change: Change | None) -> None:
        """change: a change of the order of rows, or None."""
        self._data, self._change = data, change

    def get_shape(self) -> list[int]:
        return list(self._data.shape)

    def __getitem__(self, index: Index) -> Tensor:
        """A view of the mapped file, unless the rows are reordered."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that the mapping is read-only
            rows = torch.from_numpy(self._data)
        return (self._change(rows) if self._change else rows)[index]


class MxBytes(Slice):
    """The numbers or the exponents of a stack of MXFP4, which are rearranged when they are indexed.

    data: uint8 [E, O, I / 32 * 17]. is_scale: the exponents, [E, O, I / 32]. Else the numbers as
    gpt-oss was released, [E, O, I / 32, 16]: columns 2j and 2j + 1 in byte j, the first in the low
    bits.
    """

    dtype = "U8"

    def __init__(self, data: Any, *, is_scale: bool) -> None:
        self._data = data.reshape(*data.shape[:2], -1, MX_BYTES)
        self._is_scale = is_scale

    def get_shape(self) -> list[int]:
        shape = list(self._data.shape[:3])
        return shape if self._is_scale else [*shape, MX_BYTES - 1]

    def __getitem__(self, index: Index) -> Tensor:
        blocks = self._data[index[:3]]
        if self._is_scale:
            return torch.from_numpy(blocks[..., 0].copy())
        pairs = torch.from_numpy(blocks[..., 1:].copy())
        low, high = pairs & 15, pairs >> 4  # the numbers 0 to 15, and 16 to 31
        halves = [half[..., ::2] | half[..., 1::2] << 4 for half in (low, high)]
        return torch.cat(halves, -1)[..., index[3]]


class Stack(Slice):
    """Tensors [E, O, ...] that are concatenated along O."""

    def __init__(self, parts: Sequence[Slice]) -> None:
        self._parts = parts

    def get_dtype(self) -> str:
        return self._parts[0].get_dtype()

    def get_shape(self) -> list[int]:
        shapes = [part.get_shape() for part in self._parts]
        return [shapes[0][0], sum(shape[1] for shape in shapes), *shapes[0][2:]]

    def __getitem__(self, index: Index) -> Tensor:
        """index: an expert or a slice of experts, then a slice for each axis."""
        experts, rows, *others = index
        assert isinstance(rows, slice)
        axis = 0 if isinstance(experts, int) else 1
        first = 0
        taken: list[Tensor] = []
        for part in self._parts:
            count = part.get_shape()[1]
            start, stop = (min(max(end - first, 0), count) for end in (rows.start, rows.stop))
            if start < stop or not taken:
                taken.append(part[(experts, slice(start, stop), *others)])
            first += count
        return torch.cat(taken, axis) if len(taken) > 1 else taken[0]
