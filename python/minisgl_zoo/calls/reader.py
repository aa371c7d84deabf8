"""Reads a text that arrives in pieces, with generators that yield while they wait for more text.

A method's result and the parts that it emits depend on the text alone, not on how it was cut: it
acts only on text that no later piece can change.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import Final, TypeVar

from minisgl.core.answer import Kind, Part

T = TypeVar("T")
Reading = Generator[None, None, T]
"""A method that is suspended until more text arrives or the text ends."""

SPACE = " \t\r\n"
_WORD: Final = re.compile(r"^[\w.-]+")


class Reader:
    """Mutable. buffer: the text that is not taken yet. parts: emitted and not fetched yet.

    taken: the text taken since `record`; None while nothing is recorded. is_cut: whether the text
    has ended, but not where the model ended it. Then half of a marker or of a call is left out.
    following: the stop string at which the text was cut.
    """

    def __init__(self) -> None:
        self.buffer = ""
        self.has_ended = self.is_cut = False
        self.following = ""
        self.parts: list[Part] = []
        self.taken: str | None = None

    def record(self, text: str) -> None:
        """Record `text` and what is taken from now on: it may turn out to be content."""
        self.taken = text

    def give_up(self, *, may_call: bool = True) -> None:
        """Emit the recorded text as content, and end the recording. At a cut, half a call is
        dropped. may_call: whether the text may be one."""
        if self.buffer or not (self.is_cut and may_call):
            self.emit("content", self.taken or "")
        self.taken = None

    def emit(self, kind: Kind, text: str) -> None:
        """Append a part, or extend the last part if it has the same kind."""
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
        """Return the next characters without taking them; fewer at the end of the text."""
        while len(self.buffer) < count and not self.has_ended:
            yield
        return self.buffer[:count]

    def skip_space(self) -> Reading[None]:
        while True:
            self.take(len(self.buffer) - len(self.buffer.lstrip(SPACE)))
            if self.buffer or self.has_ended:
                return
            yield

    def word(self) -> Reading[str]:
        """Take letters, digits and _.- until something else comes."""
        word = ""
        while True:
            rest = _WORD.sub("", self.buffer, count=1)
            word += self.take(len(self.buffer) - len(rest))
            if self.buffer or self.has_ended:
                return word
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

        No marker may be the start of another. Returns (text, marker); the marker is "" if the text
        ends first. With `kind` the text is emitted as it arrives, without the whitespace before the
        marker, and the returned text is only the last piece. At a cut, half of a marker is dropped.
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
                num_partial = self._num_cut(markers)
                text += self.take(len(self.buffer) - num_partial)
                if num_partial:
                    self.take(num_partial)
                    text = text.rstrip(SPACE)
                if kind:
                    self.emit(kind, text)
                return text, ""
            piece = self.take(len(self.buffer) - self._num_partial(markers))
            num_free = len(piece.rstrip(SPACE)) if kind else 0
            if kind and num_free:
                self.emit(kind, text + piece[:num_free])
                text = piece[num_free:]
            else:
                text += piece
            yield

    def _num_cut(self, markers: tuple[str, ...]) -> int:
        """Return the length of the marker's half with which a text that was cut ends."""
        num = self._num_partial(markers) if self.is_cut else 0
        tail = self.buffer[len(self.buffer) - num :] + self.following
        return num * any(mark.startswith(tail) or tail.startswith(mark) for mark in markers)

    def _num_partial(self, markers: tuple[str, ...]) -> int:
        """Return the length of the longest suffix of the buffer with which a marker begins."""
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
        """Take one JSON value. Returns its text. With `kind` it is emitted as it arrives.

        Only brackets and strings are checked. An unfinished value ends where the text ends.
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
