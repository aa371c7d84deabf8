"""Reads a tool call; one function for each syntax.

A function takes the text of a call and emits its parts. If the text is no call, it emits nothing
and returns False.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections.abc import Mapping
from typing import Final

from minisgl_zoo.calls.formats import CallFormat
from minisgl_zoo.calls.python_calls import ERRORS, LONE, dumped, python_calls
from minisgl_zoo.calls.reader import Reader, Reading

Types = Mapping[str, Mapping[str, str]]
"""Function name -> argument name -> the JSON type in its schema; "" if it has not exactly one."""
ARGUMENT_KEYS: Final = ("arguments", "parameters")


def read_object(reader: Reader, form: CallFormat, types: Types) -> Reading[bool]:
    """Read {"name": NAME, "arguments": {...}}, with keys in any order. Other keys are dropped.

    A bare call must name one of the tools; else the text is content in the form of JSON.
    """
    if not (yield from reader.starts_with("{")):
        return False
    name, held = "", "{}"
    while True:
        yield from reader.skip_space()
        char = yield from reader.peek()
        if char != '"':
            break
        key = _text((yield from reader.json_value()))
        yield from reader.skip_space()
        if not (yield from reader.starts_with(":")):
            break
        yield from reader.skip_space()
        is_arguments = key in (*ARGUMENT_KEYS, form.key)
        if is_arguments and name:
            reader.emit("call", name)
            yield from read_arguments(reader)
            held = ""
        else:
            value = yield from reader.json_value()
            if is_arguments:
                held = value
            elif key == form.name_key:
                name = _text(value)
                if form.is_bare and name not in types:
                    return False
        yield from reader.skip_space()
        yield from reader.starts_with(",")
    if name and held:
        reader.emit("call", name)
        if not (reader.is_cut and held == "{}"):  # else the arguments may have been cut off
            reader.emit("arguments", held)
    if char == "}":
        reader.take(1)
    return bool(name)


def read_named(reader: Reader, form: CallFormat, types: Types) -> Reading[bool]:
    header, marker = yield from reader.until(form.separator)
    name = _name(form, header)
    if not marker or not name:
        return False
    reader.emit("call", name)
    yield from reader.skip_space()
    yield from read_arguments(reader)
    return True


def read_tags(reader: Reader, form: CallFormat, types: Types) -> Reading[bool]:
    header, marker = yield from reader.until(form.key, "</function>", form.end)
    name = _name(form, header)
    if not marker or not name:
        return False
    reader.emit("call", name)
    reader.emit("arguments", "{")
    separator = ""
    while marker == form.key:
        key, _ = yield from reader.until(form.key_end)
        value, marker = yield from reader.until(form.value_end)
        if not marker:
            return True  # the answer was cut in this argument
        if form.value_begin and value.lstrip().startswith(form.value_begin):
            value = value.lstrip().removeprefix(form.value_begin)
        if form.key_end == ">":  # on lines of its own
            value = value.removeprefix("\n").removesuffix("\n")
        shown = _typed(value, types.get(name, {}).get(key.strip(), ""))
        reader.emit("arguments", f"{separator}{json.dumps(key.strip())}: {shown}")
        separator = ", "
        _, marker = yield from reader.until(form.key, "</function>", form.end)
    if marker:
        reader.emit("arguments", "}")
    if marker == form.end:
        reader.put_back(marker)  # the caller takes it
    return True


def read_pairs(reader: Reader, form: CallFormat, types: Types) -> Reading[bool]:
    body, marker = yield from reader.until(form.end)
    name, brace, pairs = body.partition("{")
    if not marker or not brace or not name.strip():
        return False
    reader.emit("call", name.strip())
    reader.emit("arguments", _json_of_pairs("{" + pairs, form.quote))
    reader.put_back(marker)
    return True


def read_python(reader: Reader, form: CallFormat, types: Types) -> Reading[bool]:
    """Read f(a=1, b='x'), several in a list or each on a line; or a list of JSON objects."""
    body, marker = yield from reader.until(form.end)
    calls = python_calls(body.strip(), types) if marker else []
    for name, arguments in calls:
        reader.emit("call", name)
        reader.emit("arguments", arguments)
    reader.put_back(marker if calls else "")
    return bool(calls)


READERS: Final = {
    "object": read_object,
    "named": read_named,
    "tags": read_tags,
    "pairs": read_pairs,
    "python": read_python,
}


def read_arguments(reader: Reader) -> Reading[None]:
    """Emit a call's arguments. If they are a JSON string, emit its text."""
    if (yield from reader.peek()) == '"':
        reader.emit("arguments", _text((yield from reader.json_value())))
    else:
        yield from reader.json_value("arguments")


def _name(form: CallFormat, header: str) -> str:
    found = re.fullmatch(form.name, header, re.DOTALL)
    return found[1] if found else ""


def _text(value: str) -> str:
    """Return the text of a JSON string; "" if `value` is not a JSON string. Half of a surrogate
    pair becomes U+FFFD."""
    try:
        text = json.loads(value)
    except (ValueError, RecursionError):
        return ""
    return LONE.sub("\ufffd", text) if isinstance(text, str) else ""


def _typed(value: str, type: str) -> str:
    """Return the JSON of an argument that a model wrote as plain text. type: see `Types`."""
    if type != "string":
        with contextlib.suppress(ValueError, RecursionError):
            return dumped(json.loads(value))
        if value[:1] in "{[TFN":  # some templates write values as Python does
            with contextlib.suppress(*ERRORS):
                return dumped(ast.literal_eval(value))
    return dumped(value)


_PAIRS: Final = re.compile(r"\s*([{,])\s*([\w.$-]+)\s*:")


def _json_of_pairs(text: str, quote: str) -> str:
    """Return the JSON of {key:value}, whose keys have no quotes and whose texts have `quote` before
    and behind them. If it cannot be read, return the text with JSON's quotes."""
    pieces = text.split(quote)
    for index, piece in enumerate(pieces):
        if index % 2:
            pieces[index] = dumped(piece)
        else:
            pieces[index] = _PAIRS.sub(r'\1"\2":', piece)
    shown = "".join(pieces)
    with contextlib.suppress(ValueError, RecursionError):
        return dumped(json.loads(shown))
    return shown
