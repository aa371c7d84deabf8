"""Pictures in other vendors' requests, as parts of chat completions.

A door does not know whether the model reads images. Its pictures become parts in any case; one that
a tool returned becomes `UNREADABLE` for a model that reads text only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from msgspec.structs import replace

from minisgl.errors import InvalidRequest
from minisgl.server.api.chat import ChatRequest
from minisgl.server.api.left_out import Omission
from minisgl.server.api.messages import ImagePart, ImageURL, TextPart

UNREADABLE: Final = "[an image or a file, which this model cannot read]"
"""Replaces a file that a tool returned, and an image for a model that reads text only."""
KINDS: Final = ("image", "input_image")
"""The vendors' names of images, in `Omission`s."""

Content = str | list[TextPart | ImagePart]


def picture(url: str) -> ImagePart:
    return ImagePart(image_url=ImageURL(url=url))


def picture_of(base64: str, media_type: str = "image/*") -> ImagePart:
    return picture(f"data:{media_type};base64,{base64}")


def content_of(pieces: Iterable[str | ImagePart | TextPart], between: str = "") -> Content:
    """Return a message's content: one text with `between` between the pieces, or a list of parts if
    there are pictures."""
    runs: list[list[str] | ImagePart] = []  # a text is joined once: there may be 300,000 pieces
    for index, piece in enumerate(pieces):
        for each in (between if index else "", piece):
            if isinstance(each, ImagePart):
                runs.append(each)
            elif text := each if isinstance(each, str) else each.text:
                if not runs or isinstance(last := runs[-1], ImagePart):
                    runs.append(last := [])
                last.append(text)
    if any(isinstance(run, ImagePart) for run in runs):
        return [run if isinstance(run, ImagePart) else TextPart(text="".join(run)) for run in runs]
    return "".join(text for run in runs if isinstance(run, list) for text in run)


def lines(contents: Sequence[Content | None]) -> Content:
    """Return the contents with line breaks between them."""
    given = [[each] if isinstance(each, str) else each for each in contents if each]
    pieces: list[str | ImagePart | TextPart] = []
    for index, each in enumerate(given):
        pieces += ["\n", *each] if index else each
    return content_of(pieces)


def readable(
    chat: ChatRequest, left_out: list[Omission], reads_images: bool
) -> tuple[ChatRequest, list[Omission]]:
    """Return the request and its omissions for a model that reads images, or does not. left_out:
    has all pictures of tools. Raises InvalidRequest for an image that no tool returned."""
    if reads_images:
        return chat, [each for each in left_out if each.kind not in KINDS]
    for index, each in enumerate(chat.messages):
        if each.role != "tool" and _in_words(each.content) != each.content:
            raise InvalidRequest(
                f"message {index} has images, and this model reads text only", param="messages"
            )
    messages = [
        replace(each, content=_in_words(each.content)) if each.role == "tool" else each
        for each in chat.messages
    ]
    return replace(chat, messages=messages), left_out


def _in_words(content: Content | None) -> str | None:
    """Return the content with words instead of pictures."""
    if not isinstance(content, list):
        return content
    return "".join(part.text if isinstance(part, TextPart) else UNREADABLE for part in content)
