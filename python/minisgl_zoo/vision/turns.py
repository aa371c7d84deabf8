"""Three positions for a token (multimodal RoPE, Qwen2-VL, Wang et al. 2024).

Text has three equal positions. In an image they are its start, and the row and the column of the
place; the text after it goes on behind the larger side. Each pair of dims rotates by one of them.
::

    place in the prompt    0  1 | 2  3  4  5  6  7 | 8  9          an image of 2 x 3 places
    start                  0  1 | 2  2  2  2  2  2 | 5  6
    row                    0  1 | 2  2  2  3  3  3 | 5  6
    column                 0  1 | 2  3  4  2  3  4 | 5  6

So text is rotated by one position, its place and a shift. The table of cosines and sines has some
more rows, into which each step writes those of its places in images. No kernel knows of them, but
the one that takes a row's end for its position is left out (`QKVSteps.by_place`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minisgl.core import Plan
from minisgl.core.image import Image, places_of
from minisgl.core.req import IdArray
from minisgl.layers.base import BaseOP
from minisgl.layers.rotary import RotaryEmbedding
from minisgl_zoo.vision.family import VisionFamily


class Turns:
    """Mutable: it has the shift of each row of the tables, and further rows in the model's rotary
    tables."""

    def __init__(
        self, family: VisionFamily, model: BaseOP, *, table_rows: int, most_tokens: int
    ) -> None:
        """most_tokens: prompt tokens of a step."""
        assert family.rotation
        self._family = family
        self._shifts = np.zeros(table_rows, np.int32)
        self._ropes = list({id(rope): rope for rope in _ropes(model)}.values())
        self._end = len(self._ropes[0].cos_sin)
        for rope in self._ropes:
            more = rope.cos_sin.new_zeros(most_tokens, rope.cos_sin.shape[1])
            rope.cos_sin, rope.by_place = torch.cat((rope.cos_sin, more)), False
        rotary_dim = self._ropes[0].cos_sin.shape[1]
        pairs = torch.arange(rotary_dim, device=self._ropes[0].cos_sin.device) % (rotary_dim // 2)
        _, rows, columns = family.rotation.section
        self._by_row = (pairs % 3 == 1) & (pairs < 3 * rows)
        self._by_column = (pairs % 3 == 2) & (pairs < 3 * columns)

    def write(self, plan: Plan, rows: IdArray, positions: IdArray) -> None:
        """Write the positions of a step's tokens, in place. rows: see `PoolBatch`, with padding."""
        for table_idx, _ in plan.begins:
            self._shifts[table_idx] = 0
        for table_idx, images in plan.image_begins:
            self._shifts[table_idx] = sum(self._shift(image) for image in images)
        shifts, lengths = self._shifts[rows[0]], rows[2]
        if shifts.any():
            positions[: lengths.sum()] += np.repeat(shifts, lengths)
        turned: list[tuple[slice, npt.NDArray[np.int64]]] = []
        for row, images in plan.images:
            start, end, first = plan.starts[row], plan.ends[row], int(rows[1, row])
            span = positions[first : first + end - start]
            span[:] = np.arange(start, end)
            for place, thw in self._spans(images, span, start, end):
                turned.append((slice(first + place.start, first + place.stop), thw))
        if turned:
            thw = np.concatenate([each for _, each in turned], axis=1)
            at = np.concatenate([np.r_[place] for place, _ in turned])
            positions[at] = self._end + np.arange(len(at))
            self._turn(torch.from_numpy(thw))

    def _spans(
        self, images: Sequence[Image], span: IdArray, start: int, end: int
    ) -> Iterator[tuple[slice, npt.NDArray[np.int64]]]:
        """Shift the positions [start, end) of a request, in place. Yields the places of images in
        them, and their three positions, [3, N]."""
        shift = 0
        for image in images:
            first, last = int(places_of(image)[0]), int(places_of(image)[-1]) + 1
            low, high = (min(max(place, start), end) for place in (first, last))
            inner = np.arange(low - first, high - first, dtype=np.int64)
            if low < high:
                _, width = self._family.grid(image.sizes)
                thw = np.stack((0 * inner, inner // width, inner % width)) + first + shift
                yield slice(low - start, high - start), thw
            span[high - start :] += self._shift(image)
            shift += self._shift(image)

    def _shift(self, image: Image) -> int:
        """Return by how much an image shifts the positions behind it."""
        return max(self._family.grid(image.sizes)) - len(places_of(image))

    def _turn(self, thw: Tensor) -> None:
        """Write the cosines and sines of places in images behind those of text."""
        for rope in self._ropes:
            table = rope.cos_sin
            starts, rows, columns = table[thw.to(table.device)]
            mixed = torch.where(self._by_row, rows, torch.where(self._by_column, columns, starts))
            table[self._end : self._end + len(mixed)] = mixed


def _ropes(model: object) -> Iterator[RotaryEmbedding]:
    """Yield the rotary embeddings below a layer, some of them several times."""
    if isinstance(model, RotaryEmbedding):
        yield model
    elif isinstance(model, BaseOP):
        for value in [*vars(model).values(), *model.children()]:
            yield from _ropes(value)
