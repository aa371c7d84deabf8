"""The parser of one answer: pieces of text in, parts out.

An answer is content with tool calls in it, after reasoning; or it is several messages, each with a
header (`MessageFormat`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

import msgspec

from minisgl.core.answer import Kind, Part
from minisgl_zoo.calls.formats import CallFormat, MessageFormat
from minisgl_zoo.calls.known import CALLS, REASONING, message_format
from minisgl_zoo.calls.reader import SPACE, Reader, Reading
from minisgl_zoo.calls.syntax import ARGUMENT_KEYS, READERS, Types, read_arguments


def read_content(reader: Reader, calls: CallFormat, types: Types) -> Reading[None]:
    """Read content and tool calls. Text that begins like a call but is none is content. Hunyuan
    also writes a section around an answer without calls."""
    marks = [mark for mark in (calls.begin, *calls.section) if mark]
    if calls.is_bare:
        reader.record("")
        yield from reader.skip_space()
        if (yield from reader.peek()) == "{":
            yield from _read_calls(reader, calls, types)
        else:
            reader.give_up()
    while True:
        _, mark = yield from reader.until(*marks, kind="content")
        if not mark:
            return
        if mark == calls.begin:
            reader.record(mark)
            yield from _read_calls(reader, calls, types)
        else:
            yield from reader.skip_space()


def _read_calls(reader: Reader, calls: CallFormat, types: Types) -> Reading[None]:
    """Read the calls behind one `begin`: a call, or a list of calls."""
    is_first = True
    yield from reader.skip_space()
    is_list = calls.syntax == "object" and (yield from reader.starts_with("["))
    while True:
        yield from reader.skip_space()
        if not (yield from READERS[calls.syntax](reader, calls, types)):
            reader.give_up(may_call=not is_first or _may_call(reader.taken or "", calls, types))
            return
        is_first = False
        reader.record("")
        yield from reader.skip_space()
        if is_list and (yield from reader.starts_with(",")):
            continue
        if calls.is_bare and (yield from reader.starts_with(";")):
            continue
        break
    reader.taken = None
    if is_list:
        yield from reader.starts_with("]")
    if calls.end:
        yield from reader.until(calls.end)
    if calls.section[1]:
        yield from reader.skip_space()
        yield from reader.starts_with(calls.section[1])
    yield from reader.skip_space()


def _may_call(text: str, calls: CallFormat, types: Types) -> bool:
    """Return whether a call may begin with `text`. An answer in JSON begins like a bare one."""
    said = re.sub(r"\s", "", text)
    if not calls.is_bare or said.startswith(calls.begin):
        return True
    keys = [f'{{"{key}":' for key in (*ARGUMENT_KEYS, calls.key, "type")]
    starts = [f'{{"{calls.name_key}":"{name}"' for name in types] + keys
    return any(start.startswith(said[: len(start)]) for start in starts)


_BEGIN: Final = "<|message|>"


def read_messages(
    reader: Reader, form: MessageFormat, types: Types, set_reasoning: Callable[[bool], None]
) -> Reading[None]:
    """Read messages: calls, reasoning or content. A text without a message is content.

    set_reasoning: called when reasoning begins and ends.
    """
    is_first, header = True, ""
    while True:
        reader.taken = ""
        if not header:
            header, mark = yield from reader.until(_BEGIN)
            if not mark:
                if is_first and not (reader.is_cut and _is_header(form, header)):
                    reader.emit("content", header)
                return
        is_first = False
        following = ""
        if re.search(form.reasoning, header):
            set_reasoning(True)
            following = yield from _read_text(reader, form, "reasoning")
            set_reasoning(False)
        elif call := re.search(form.call, header):
            if form.calls:
                text, mark = yield from reader.until(*form.ends)
                _emit_calls(reader, form.calls, text, types, is_cut=reader.is_cut and not mark)
            else:
                reader.emit("call", call[1])
                yield from reader.skip_space()
                yield from read_arguments(reader)
                yield from reader.until(*form.ends)
        else:
            following = yield from _read_text(reader, form, "content")
        header = following


def _read_text(reader: Reader, form: MessageFormat, kind: Kind) -> Reading[str]:
    """Emit a message's text. Returns the next header, if it follows without an end; else ""."""
    marks = (*form.ends, form.bare) if form.bare else form.ends
    while True:
        piece, mark = yield from reader.until(*marks, kind=kind)
        if not mark or mark != form.bare:
            return ""
        name = yield from reader.word()
        if (yield from reader.starts_with(_BEGIN)):
            return mark + name
        reader.emit(kind, piece[len(piece.rstrip(SPACE)) :] + mark + name)


def _is_header(form: MessageFormat, text: str) -> bool:
    """Return whether `text`, at which an answer was cut, may be the begin of a header."""
    begin = text.lstrip(SPACE)
    return any(mark.startswith(begin[: len(mark)]) for mark in (*form.markers, "to="))


def _emit_calls(
    reader: Reader, calls: CallFormat, text: str, types: Types, *, is_cut: bool
) -> None:
    """Emit the calls of a whole message. One that is cut off is not continued by the next."""
    inner = Reader()
    inner.buffer, inner.has_ended, inner.is_cut = text, True, is_cut
    for _ in read_content(inner, calls, types):
        pass
    for part in inner.parts:
        reader.emit(*part)


_NO_TYPES: Final[dict[str, dict[str, str]]] = {}


class AnswerForm(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The formats of an answer's parts.

    calls, reasoning: names of `minisgl_zoo.calls.known`, "" if the answer has none. is_open:
    whether the prompt ends within reasoning. types: see `minisgl_zoo.calls.syntax.Types`.
    """

    calls: str = ""
    reasoning: str = ""
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
            begin, end = REASONING[form.reasoning]
            yield from self._read_reasoning(begin, end)
        if form.calls:
            yield from read_content(reader, CALLS[form.calls], form.types)
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
