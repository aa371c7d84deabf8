"""The images of a chat's messages: read by a helper process, then put into the prompt's ids."""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from minisgl.core.image import LOWEST, Image, places_of
from minisgl.errors import CONTEXT_IS, EngineError, InvalidRequest, PromptTooLong
from minisgl.message import ids_from_bytes, ids_to_bytes
from minisgl.tokenizer.template import Part
from minisgl.tokenizer.tokenize import Encoded, PromptEncoder
from minisgl.utils.helper import Helper, HelperEnded, packed
from minisgl_zoo.vision.family import VisionFamily, family_of
from minisgl_zoo.vision.lately import KEPT_BYTES, Lately
from minisgl_zoo.vision.sources import FETCHES_S, Web, source_of

LOAD_S: Final = 60.0
"""The most CPU seconds of importing transformers and its processor: 1.2 s on a busy core."""

READ_S: Final = 5.0
"""The most CPU seconds of one picture. One of the largest size took 1.6 s."""

MAX_MEMORY: Final = 2**30
"""The most bytes that a picture may take: three times those of the largest one, decoded."""

MAX_IMAGES: Final = 100
"""Of a request, as in Anthropic's API."""

MIN_PLACES: Final = 9
"""So many ids of 30 bits hold at least 256 bits of a hash. An image with fewer places gets a
namespace of the prefix cache."""

ROLES: Final = ("user", "tool")
"""Whose messages may have images. No template writes them elsewhere."""


class Read(NamedTuple):
    """A picture that was read: its tiles, and the ids that stand for each."""

    tiles: Sequence[Image]
    ids: Sequence[list[int]]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.ids))


@dataclass(frozen=True, slots=True)
class ReadImages:
    """The pictures of a prompt, in order. mark: the id that the template writes for each."""

    mark: int
    pictures: Sequence[Read]

    def placed(self, encoded: Encoded) -> Encoded:
        """Return the prompt with the ids of its images. Raises InvalidRequest."""
        ids = ids_from_bytes(encoded.ids)
        marks = np.flatnonzero(ids == self.mark)
        if len(marks) != len(self.pictures):
            raise InvalidRequest(
                f"the chat template of this model writes {len(marks)} of {len(self.pictures)} "
                "images; put images into messages of the user",
                param="messages",
            )
        pieces: list[Any] = []
        images: list[Image] = []
        end = length = 0
        for mark, read in zip(marks.tolist(), self.pictures, strict=True):
            pieces.append(ids[end:mark])
            length += mark - end
            for tile, tile_ids in zip(read.tiles, read.ids, strict=True):
                pieces.append(tile_ids)
                places = length + np.flatnonzero(np.array(tile_ids) == tile.token)
                at = ids_to_bytes(places.astype(np.int32))
                images.append(msgspec.structs.replace(tile, places=at))
                length += len(tile_ids)
            end = mark + 1
        if end == len(ids):
            raise InvalidRequest("a prompt must not end with an image", param="messages")
        whole = np.concatenate([*pieces, ids[end:]])
        return replace(encoded, ids=ids_to_bytes(whole.astype(np.int32)), images=tuple(images))


class ImageReader:
    """Reads the images of chats for one checkpoint. Mutable: it starts the helper process, and
    keeps what it read lately."""

    def __init__(self, encoder: PromptEncoder, family: VisionFamily) -> None:
        self._family, self._encoder = family, encoder
        folder = encoder.folder
        self._lately: Lately[Read] = Lately(KEPT_BYTES)
        self._web = Web()
        self._helper = Helper("minisgl_zoo.vision.reader", [str(folder), str(MAX_MEMORY)])

    def load(self) -> None:
        """Start the helper, so that the first image need not wait. Raises EngineError."""
        try:
            answer = self._helper.ask(packed(["load"]), LOAD_S)
        except HelperEnded as error:
            answer = ["problem", f"it {error}"]
        if answer[0] == "problem":
            raise EngineError(f"the process that reads images cannot start: {answer[1]}")

    def read(
        self, messages: Sequence[Mapping[str, Any]], most_tokens: int | None
    ) -> tuple[list[dict[str, Any]], ReadImages]:
        """Return the messages with a `Part` for each image, and the images.

        most_tokens: more are refused at once. Raises InvalidRequest, PromptTooLong.
        """
        chat = self._encoder.chat
        if not chat.image_text:
            chat.image_around = self._family.around
            chat.image_text = self._family.written(self._encoder.tokenizer.backend.id_to_token)
        found: list[Read] = []
        num_tokens = 0
        shown = []
        fetch = partial(self._web.file, end=time.monotonic() + FETCHES_S)
        for index, message in enumerate(messages):
            content = message.get("content")
            if not isinstance(content, list):
                shown.append(dict(message))
                continue
            parts = []
            for number, part in enumerate(content):
                where = f"messages[{index}].content[{number}]"
                source = source_of(part, where, self._encoder.media, fetch)
                if source is None:
                    parts.append(part)
                    continue
                if message.get("role") not in ROLES:
                    raise InvalidRequest(
                        f"{where} is an image, which only the roles user and tool may have",
                        param=where,
                    )
                if len(found) == MAX_IMAGES:
                    raise InvalidRequest(
                        f"a request may have {MAX_IMAGES} images, {where} is one more", param=where
                    )
                found.append(self._read(source, where))
                num_tokens += found[-1].num_tokens
                if most_tokens is not None and num_tokens > most_tokens:
                    raise PromptTooLong(
                        f"the prompt is too long: the images up to {where} take {num_tokens:,} "
                        f"tokens, but {CONTEXT_IS} {most_tokens} tokens; send fewer images, or "
                        "smaller ones",
                        limit=most_tokens,
                        got=num_tokens,
                        param=where,
                    )
                parts.append(Part(type="image"))
            content = self._in_text(parts) if message.get("role") == "tool" else parts
            shown.append({**message, "content": content})
        return shown, ReadImages(self._family.mark, found)

    def _in_text(self, parts: Sequence[Any]) -> Any:
        """Return the content of a tool's result as one text, with marks for its images, because few
        templates write parts there."""
        texts = [part.get("text") for part in parts if not isinstance(part, Part)]
        if len(texts) == len(parts) or not all(isinstance(text, str) for text in texts):
            return parts  # without images, or refused later
        chat = self._encoder.chat
        shown = (chat.image_mark if isinstance(part, Part) else part["text"] for part in parts)
        return "".join(shown)

    def _read(self, source: str, where: str) -> Read:
        key = hashlib.sha256(source.encode()).digest()
        if (read := self._lately.get(key)) is None:
            read = self._decode(source, where)
            self._lately.put(key, read, sum(tile.num_bytes for tile in read.tiles))
        return read

    def _decode(self, source: str, where: str) -> Read:
        question = packed(["read", source])
        try:
            while (answer := self._helper.ask(question, READ_S))[0] == "unknown":
                self.load()
        except HelperEnded as error:
            answer = ["problem", f"reading it {error}"]
        if answer[0] == "problem":
            raise InvalidRequest(f"{where} is no image that can be read: {answer[1]}", param=where)
        family = self._family
        tiles = [
            Image(
                digest=bytes.fromhex(digest),
                places=b"",
                token=family.token,
                shape=tuple(shape),
                sizes=tuple(sizes),
                whole=family.whole,
                pixels=base64.b64decode(pixels),
            )
            for pixels, shape, sizes, digest in answer[1]
        ]
        return Read(tiles, family.expand([tile.sizes for tile in tiles], self._id_of))

    def moved(self, ids: bytes, images: Sequence[Image]) -> tuple[Image, ...]:
        """Return the images at their places in other ids of their prompt. Raises InvalidRequest."""
        places = np.flatnonzero(ids_from_bytes(ids) == self._family.token).astype(np.int32)
        ends = np.cumsum([len(places_of(image)) for image in images])
        if len(places) != ends[-1]:
            raise InvalidRequest(
                f"the images of this chat take {ends[-1]} tokens, and took {len(places)} before "
                "the engine started again; send it anew",
                param="messages",
            )
        moved = zip(images, np.split(places, ends[:-1]), strict=True)
        return tuple(msgspec.structs.replace(each, places=ids_to_bytes(at)) for each, at in moved)

    def keyed(self, ids: bytes, images: Sequence[Image]) -> bytes:
        """Return the ids of a prompt as `UserMsg` has them (`minisgl.core.image`)."""
        keys = ids_from_bytes(ids).copy()
        for image in images:
            places = places_of(image)
            bits = np.frombuffer(hashlib.shake_256(image.digest).digest(4 * len(places)), "<u4")
            keys[places] = LOWEST + (bits % LOWEST).astype(np.int32)
        return ids_to_bytes(keys)

    def namespace_of(self, namespace: str, images: Sequence[Image]) -> str:
        """Return the namespace of a prompt with images, some of which may have few places."""
        small = [image.digest for image in images if len(places_of(image)) < MIN_PLACES]
        if not small:
            return namespace
        return hashlib.sha256(b"".join([namespace.encode(), *small])).hexdigest()

    def _id_of(self, token: str) -> int:
        found = self._encoder.tokenizer.backend.token_to_id(token)
        if found is None:
            raise InvalidRequest(
                f"the tokenizer of this model lacks {token}, so it reads no images",
                param="messages",
            )
        return found


def create_reader(encoder: PromptEncoder) -> ImageReader | None:
    """Return what reads the images of this checkpoint's chats; None if it reads text only."""
    family = family_of(encoder.folder)
    return ImageReader(encoder, family) if family else None
