"""A rank's share of the tensors that a checkpoint holds beside, or instead of, a matrix.

Such a tensor has an entry for each unit of the matrix: `unit` rows by `unit` columns. A rank takes
whole units, and the last unit of a matrix may be smaller::

    matrix  [5, 6], unit (2, 4)    |- - - -|- -|
                                   |- - - -|- -|
                                   |- - - -|- -|
                                   |- - - -|- -|     entries [3, 2]
                                   |- - - -|- -|
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from minisgl.errors import ConfigError
from minisgl.quantization.parameter import Part

ALL = 0
"""In a `Unit`: all rows, or all columns, of the matrix."""

Unit = tuple[int, int]
"""The rows and columns that one entry stands for."""


def entries(sizes: Sequence[int], unit: Unit) -> tuple[int, int]:
    """The shape of a tensor that has one entry for each unit of a matrix [rows, columns]."""
    rows, columns = (
        -(-size // (each or size or 1)) for size, each in zip(sizes, unit, strict=True)
    )
    return rows, columns


def per_unit(
    part: Part,
    name: str,
    unit: Unit,
    *,
    alias: str | None = None,
    flat: bool = False,
    transposed: bool = False,
    unread: Sequence[str] = (),
    stored: torch.dtype | None = None,
    rearrange: Callable[[Tensor], Tensor] | None = None,
) -> Part:
    """The share of tensor MODULE.`name`, with an entry for each unit, that goes with `part`.

    alias, unread: names inside the module; see `Part` for their meaning and for stored and
    rearrange. flat: the tensor has one column of entries, stored as a vector. transposed: the file
    has columns before rows. Raises ConfigError if the rank's share cuts a unit.
    """
    shape: tuple[int, ...] = entries(part.shape, unit)
    axis, share, size = part.axis, part.share, unit[part.axis]
    if not share:
        share = range(0)
    elif size == ALL:
        share = range(1)
    else:
        _check_cut(part, size)
        share = range(share.start // size, -(-share.stop // size))
    if flat:
        if axis == 1 and share:
            share = range(shape[0])
        shape, axis = shape[:1], 0
    if transposed:
        shape, axis = shape[::-1], 1 - axis
    return replace(
        part,
        name=f"{part.module}.{name}",
        alias=f"{part.module}.{alias}" if alias else None,
        shape=shape,
        axis=axis,
        share=share,
        stack=None,
        unread=tuple(f"{part.module}.{other}" for other in unread),
        stored=stored,
        rearrange=rearrange,
    )


def _check_cut(part: Part, size: int) -> None:
    start, stop, width = part.share.start, part.share.stop, part.shape[part.axis]
    if start % size or (stop % size and stop != width):
        what = ("rows", "columns")[part.axis]
        raise ConfigError(
            f"{part.module}: a rank would hold {what} {start} to {stop} of {width}, but the "
            f"checkpoint quantises {what} in units of {size}, which ranks cannot share; use "
            "fewer ranks (--tp)"
        )


def local_rows(parts: Sequence[Part], stacked: int | None) -> list[int]:
    """How many rows of each merged matrix this rank holds. All matrices of a stack have the
    same."""
    held = [part.local_shape[0] for part in parts if part.share]
    return held[: len(held) // (stacked or 1)]
