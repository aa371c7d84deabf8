"""Reads content with tool calls in it."""

from __future__ import annotations

import re

from minisgl_zoo.calls.formats import CallFormat
from minisgl_zoo.calls.reader import Reader, Reading
from minisgl_zoo.calls.syntax import ARGUMENT_KEYS, READERS, Types


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
