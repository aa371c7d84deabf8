"""Reads a text that arrives in pieces, with methods that wait for more text by yielding.

What a method returns and emits depends on the text alone and not on how it was cut: it acts only on
text that no later piece can change, and waits for the rest.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

from minisgl.tokenizer.parse.answer import Kind, Part

T = TypeVar("T")
Reading = Generator[None, None, T]
"""A method that is suspended until more text comes or the text ends."""

SPACE = " \t\r\n"


class Reader:
    """Mutable. buffer: text that is not taken yet. parts: what was emitted and not fetched.

    taken: the text that was taken since `record`, None before.
    """

    def __init__(self) -> None:
        self.buffer = ""
        self.has_ended = False
        self.parts: list[Part] = []
        self.taken: str | None = None

    def record(self, text: str) -> None:
        """Keep what is taken from now on behind `text`, which may turn out to be content."""
        self.taken = text

    def give_up(self) -> None:
        """Emit what was recorded as content."""
        self.emit("content", self.taken or "")
        self.taken = None

    def emit(self, kind: Kind, text: str) -> None:
        """Append a part; text of the kind of the last part is joined with it."""
        if kind != "call" and self.parts and self.parts[-1][0] == kind:
            self.parts[-1] = (kind, self.parts[-1][1] + text)
        elif text or kind == "call":
            self.parts.append((kind, text))

    def take(self, count: int) -> str:
        text, self.buffer = self.buffer[:count], self.buffer[count:]
        if self.taken is not None:
            self.taken += text
        return text

    def put_back(self, text: str) -> None:
        self.buffer = text + self.buffer

    def peek(self, count: int = 1) -> Reading[str]:
        """The next characters; fewer at the end of the text."""
        while len(self.buffer) < count and not self.has_ended:
            yield
        return self.buffer[:count]

    def skip_space(self) -> Reading[None]:
        while True:
            self.take(len(self.buffer) - len(self.buffer.lstrip(SPACE)))
            if self.buffer or self.has_ended:
                return
            yield

    def starts_with(self, text: str) -> Reading[bool]:
        """Take `text` if it comes next. Returns whether it did."""
        while len(self.buffer) < len(text) and text.startswith(self.buffer) and not self.has_ended:
            yield
        if not self.buffer.startswith(text):
            return False
        self.take(len(text))
        return True

    def until(self, *markers: str, kind: Kind | None = None) -> Reading[tuple[str, str]]:
        """Take the text before the first of `markers`, and the marker.

        No marker may be the start of another. With `kind` the text is emitted as it comes, without
        the whitespace before the marker. Returns (text, marker); without `kind` the whole text. At
        the end of the text the marker is "".
        """
        text = ""
        while True:
            found = [(at, marker) for marker in markers if (at := self.buffer.find(marker)) >= 0]
            if found:
                at, marker = min(found)
                text += self.take(at)
                if kind:
                    self.emit(kind, text.rstrip(SPACE))
                self.take(len(marker))
                return text, marker
            if self.has_ended:
                text += self.take(len(self.buffer))
                if kind:
                    self.emit(kind, text)
                return text, ""
            text += self.take(len(self.buffer) - self._num_partial(markers))
            if kind:
                is_free = len(text.rstrip(SPACE))
                self.emit(kind, text[:is_free])
                text = text[is_free:]
            yield

    def _num_partial(self, markers: tuple[str, ...]) -> int:
        """The longest end of the buffer that may be the start of a marker."""
        return max(
            (
                length
                for marker in markers
                for length in range(1, min(len(marker), len(self.buffer) + 1))
                if self.buffer.endswith(marker[:length])
            ),
            default=0,
        )

    def json_value(self, kind: Kind | None = None) -> Reading[str]:
        """Take one JSON value; with `kind` it is emitted as it comes. Returns its text.

        Only brackets and strings are looked at. An unfinished value ends with the text.
        """
        text, depth, in_string, is_escaped = "", 0, False, False
        while True:
            end = len(self.buffer)
            is_complete = False
            for index, char in enumerate(self.buffer):
                if in_string:
                    in_string = char != '"' or is_escaped
                    is_escaped = char == "\\" and not is_escaped
                elif char in "}]," and depth == 0:  # behind a number or a word
                    end, is_complete = index, True
                    break
                else:
                    depth += (char in "{[") - (char in "}]")
                    in_string = char == '"'
                if depth == 0 and not in_string and char in '}]"':
                    end, is_complete = index + 1, True
                    break
            piece = self.take(end)
            text += piece
            if kind:
                self.emit(kind, piece)
            if is_complete or self.has_ended:
                return text
            yield
