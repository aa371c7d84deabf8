"""An image of a prompt, from the tokenizer to the engine.

A vision tower turns an image into rows of the width of an embedding. The prompt has a place for
each of them. In `UserMsg.ids` these places have ids above every vocabulary, made from a hash of the
image, so equal ids are equal images: what compares prompts need not know of images. The scheduler
gives the prefix cache these ids, and all others the id that the model has at such a place.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np

from minisgl.core.event import Record
from minisgl.core.req import IdArray

LOWEST: Final = 2**30
"""Ids of images are from here on. No vocabulary is that large."""


class Media(NamedTuple):
    """Where images may come from beside data: URLs. folder: from files below it. fetches: from the
    web."""

    folder: str | None = None
    fetches: bool = False


NO_MEDIA: Final = Media()


class Image(Record, frozen=True, kw_only=True):
    """An image of a prompt, decoded and resized.

    digest: of its content, its size and its processor. places: its positions in the prompt,
    ascending little-endian int32. token: the model's id there. shape: of the pixels. sizes: further
    numbers that its family's tower needs. whole: its places are side by side and attend to each
    other both ways, so no step ends between them. pixels: uint8; b"" on other ranks than 0.
    """

    digest: bytes
    places: bytes
    token: int
    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    whole: bool = False
    pixels: bytes = b""

    @property
    def num_bytes(self) -> int:
        """The bytes of its pixels on rank 0."""
        return math.prod(self.shape)


class RowImages(NamedTuple):
    """The images of a request. row: of a step, which computes tokens up to the end of its last
    image; or of the tables, which it gets in a step."""

    row: int
    images: Sequence[Image]


def places_of(image: Image) -> IdArray:
    return np.frombuffer(image.places, "<i4")


def bytes_within(images: Iterable[Image], start: int, end: int) -> int:
    """Return the bytes of the images that have a place in [start, end) of the prompt."""
    bounds = ((each, places_of(each)[[0, -1]].tolist()) for each in images)
    return sum(each.num_bytes for each, (first, last) in bounds if first < end and start <= last)


def end_of(images: Sequence[Image]) -> int:
    """Return the end of the last image in the prompt; 0 without images."""
    return int(places_of(images[-1])[-1]) + 1 if images else 0


class Span(NamedTuple):
    """The places [start, end) of an image that is computed whole."""

    start: int
    end: int


def span_at(images: Iterable[Image], position: int) -> Span | None:
    """Return the whole image that has a position of the prompt; None if none has."""
    for image in images:
        if image.whole:
            places = places_of(image)
            if position < (end := int(places[-1]) + 1):
                start = int(places[0])
                return Span(start, end) if start <= position else None
    return None


def plain_ids(ids: IdArray, images: Iterable[Image]) -> IdArray:
    """Return a copy of the ids that has the model's id at the places of images."""
    plain = ids.copy()
    for image in images:
        plain[places_of(image)] = image.token
    return plain
