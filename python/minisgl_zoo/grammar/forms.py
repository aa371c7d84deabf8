"""Checks the option `structured_outputs`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from minisgl.core.sampling import KINDS
from minisgl.errors import InvalidSampling
from minisgl.utils.text import brief, is_unicode, num_levels

MAX_CHARACTERS: Final = 128 * 1024
"""The most characters of a schema, regex, grammar or list of choices. It bounds the work before
compiling. Compiling has a bound of its own."""
MAX_LEVELS: Final = 100
"""The most levels of nested objects and lists. llguidance reads 128, some of which it adds
itself."""
OPTION: Final = "structured_outputs"


def checked_structured_outputs(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return `structured_outputs` with one entry: a schema becomes JSON text, choices a list.

    fields: the sampling parameters that are given, by name. Later the tokenizer checks whether the
    grammar can be compiled. Raises InvalidSampling.
    """
    given = fields[OPTION]
    if not isinstance(given, Mapping):
        raise _wrong(f"must be a dictionary with one of {', '.join(KINDS)}, got {brief(given)}")
    present = {name: value for name, value in given.items() if value is not None}
    if len(present) != 1 or not present.keys() <= set(KINDS):
        raise _wrong(f"must have exactly one of {', '.join(KINDS)}, got {brief(list(present))}")
    for name in ("ignore_eos", "min_tokens", "allowed_token_ids"):
        if fields.get(name):
            raise _wrong(
                f"cannot be combined with {name}: the grammar says which tokens are allowed and "
                f"where the answer ends; leave {name} out"
            )
    [(kind, value)] = present.items()
    if kind == "json":
        return {kind: json_text(value, f"{OPTION}.json")}
    if kind == "json_object":
        if value is not True:
            raise _wrong(f"must be True, got {brief(value)}", f"{OPTION}.json_object")
        return {kind: True}
    if kind == "choice":
        if isinstance(value, list | tuple):
            _check_size(len(value), f"{OPTION}.choice", "more than ")  # of which each text has one
        if not isinstance(value, list | tuple) or not value or not all(map(_is_text, value)):
            raise _wrong(f"must be a list of texts, got {brief(value)}", f"{OPTION}.choice")
        _check_size(sum(len(text) for text in value), f"{OPTION}.choice")
        return {kind: list(value)}
    if not _is_text(value):
        raise _wrong(f"must be a text, got {brief(value)}", f"{OPTION}.{kind}")
    _check_size(len(value), f"{OPTION}.{kind}")
    return {kind: value}


def json_text(schema: Any, param: str) -> str:
    """Return a JSON schema as JSON text. schema: a dictionary, a boolean, or JSON text of one.

    Raises InvalidSampling, which names `param`, if it is none of these, too large or too deep.
    """
    if isinstance(schema, str):
        _check_size(len(schema), param)
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise _wrong(f"must be JSON: {error}", param) from None
    if not isinstance(schema, dict | bool):
        raise _wrong(f"must be an object, as JSON schemas are, got {brief(schema)}", param)
    _check_size(_least_size(schema), param, "more than ")  # 10 MB of JSON would take a second
    if num_levels(schema, MAX_LEVELS) > MAX_LEVELS:
        raise _wrong(
            f"has more than {MAX_LEVELS} levels of objects and lists in one another; at most "
            f"{MAX_LEVELS} are allowed",
            param,
        )
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        text.encode()
    except (TypeError, ValueError) as error:
        raise _wrong(f"is no JSON: {error}", param) from None
    _check_size(len(text), param)
    return text


def _least_size(schema: Any) -> int:
    """Return a lower bound of the length of `schema` as JSON text. Above `MAX_CHARACTERS` counting
    ends."""
    size, items = 0, [schema]
    while items and size <= MAX_CHARACTERS:
        inner: list[Any] = []
        for item in items:
            if isinstance(item, dict):
                size += sum(len(key) for key in item if isinstance(key, str))
                inner += item.values()
            elif isinstance(item, list):
                inner += item
            elif isinstance(item, str):
                size += len(item)
        size += len(inner)
        items = inner
    return size


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != "" and is_unicode(value)


def _check_size(size: int, param: str, at_least: str = "") -> None:
    if size > MAX_CHARACTERS:
        size = MAX_CHARACTERS if at_least else size
        raise _wrong(
            f"has {at_least}{size} characters, and at most {MAX_CHARACTERS} are allowed", param
        )


def _wrong(reason: str, param: str = OPTION) -> InvalidSampling:
    return InvalidSampling(f"{param} {reason}", param=param)
