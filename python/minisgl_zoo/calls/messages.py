"""Reads an answer of several messages, each with a header (`MessageFormat`)."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from minisgl.core.answer import Kind
from minisgl_zoo.calls.content import read_content
from minisgl_zoo.calls.formats import CallFormat, MessageFormat
from minisgl_zoo.calls.reader import SPACE, Reader, Reading
from minisgl_zoo.calls.syntax import Types, read_arguments

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
