"""The parser of one answer: pieces of text in, parts out."""

from __future__ import annotations

from typing import Final

import msgspec

from minisgl.core.answer import Part
from minisgl_zoo.calls.content import read_content
from minisgl_zoo.calls.known import Calls, Marks, call_format, message_format, reasoning_marks
from minisgl_zoo.calls.messages import read_messages
from minisgl_zoo.calls.reader import Reader, Reading

_NO_TYPES: Final[dict[str, dict[str, str]]] = {}


class AnswerForm(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The formats of an answer's parts.

    calls, reasoning: "" if the answer has none. is_open: whether the prompt ends within reasoning.
    types: see `minisgl_zoo.calls.syntax.Types`.
    """

    calls: Calls = ""
    reasoning: Marks = ""
    is_open: bool = False
    types: dict[str, dict[str, str]] = _NO_TYPES


class AnswerParser:
    """The state of one answer. Mutable. is_reasoning: whether the text so far ends within
    reasoning."""

    def __init__(self, form: AnswerForm) -> None:
        self._reader = Reader()
        self._is_open = form.is_open
        if messages := message_format(form.calls, form.reasoning):
            self._reading = read_messages(self._reader, messages, form.types, self._set_reasoning)
        else:
            self._reading = self._read(form)
        self.is_reasoning = False
        self._advance()

    def feed(self, text: str) -> list[Part]:
        """Return the parts that are final with this text."""
        self._reader.buffer += text
        return self._advance()

    def flush(self, *, is_cut: bool = False, following: str = "") -> list[Part]:
        """Return the other parts: no text follows. is_cut, following: see `Reader`."""
        self._reader.has_ended, self._reader.is_cut = True, is_cut
        self._reader.following = following
        return self._advance()

    def _advance(self) -> list[Part]:
        try:
            next(self._reading)
        except StopIteration:
            if self._reader.buffer:
                self._reader.emit("content", self._reader.take(len(self._reader.buffer)))
        parts, self._reader.parts = self._reader.parts, []
        return parts

    def _set_reasoning(self, is_reasoning: bool) -> None:
        self.is_reasoning = is_reasoning

    def _read(self, form: AnswerForm) -> Reading[None]:
        reader = self._reader
        if form.reasoning:
            begin, end = reasoning_marks(form.reasoning)
            yield from self._read_reasoning(begin, end)
        if form.calls:
            yield from read_content(reader, call_format(form.calls), form.types)
        else:
            yield from reader.until(kind="content")

    def _read_reasoning(self, begin: str, end: str) -> Reading[None]:
        reader = self._reader
        self.is_reasoning = self._is_open
        reader.record("")
        yield from reader.skip_space()
        is_begun = yield from reader.starts_with(begin)  # even if the prompt ends with it
        if not is_begun and not self._is_open:
            reader.give_up()
            if reader.is_cut and begin.startswith(reader.buffer):
                reader.buffer = ""
            return
        reader.taken = None
        self.is_reasoning = True
        yield from reader.skip_space()
        yield from reader.until(end, kind="reasoning")
        self.is_reasoning = False
        yield from reader.skip_space()
