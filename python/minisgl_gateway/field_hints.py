"""What a wrong field of a request's body probably means, and which values it may have."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any, Final

from msgspec import inspect

MAX_READ: Final = 65  # characters of an unknown name that are compared; our names have fewer
MAX_LISTED: Final = 8  # fields that an error lists

_SYNONYMS: Final = {
    **dict.fromkeys(("max_new_tokens", "n_predict", "num_predict"), "max_tokens"),
    "max_output_tokens": "max_tokens",
    "stop_sequences": "stop",
    "stop_strings": "stop",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "stop": "stop_sequences",
    **dict.fromkeys(("messages", "prompt", "text"), "input"),
}
"""Other APIs' names of our fields."""


def hint(kind: Any, path: str, unknown: str | None, is_top: bool) -> str:
    """Return the end of the error for the value at `path` of a `kind`, or "".

    unknown: the name of a field that does not exist there; None: the value is wrong. is_top: it is
    a field of the body itself, which has too many to list.
    """
    types = list(_types_at(kind, path))
    if unknown is None:
        return _accepted(types)
    known = list(dict.fromkeys(field for each in types for field in _field_names(each)))
    if unknown == "messages" and "prompt" in known:
        return "; /v1/chat/completions and /api/chat take messages"
    if near := _similar(unknown, known):
        return f"; did you mean {near}?"
    return f"; known are {', '.join(known)}" if not is_top and 0 < len(known) <= MAX_LISTED else ""


def _field_names(type_: inspect.Type) -> list[str]:
    if not isinstance(type_, inspect.StructType):
        return []
    tag = [type_.tag_field] if type_.tag_field else []
    return tag + [field.encode_name for field in type_.fields]


def _similar(given: str, known: Sequence[str]) -> str:
    """Return the known name that an unknown one probably means, or ""."""
    # min_tokens and max_tokens are similar names with opposite meanings.
    opposite = {"min": "max", "max": "min"}.get(given[:3], "")
    known = [name for name in known if not opposite or not name.startswith(opposite)]
    if _SYNONYMS.get(given) in known:
        return _SYNONYMS[given]
    return next(iter(difflib.get_close_matches(given[:MAX_READ], known, 1, 0.85)), "")


def _accepted(types: Iterable[inspect.Type]) -> str:
    """Return "; it may be text, json_object or json_schema", or "" if any value is right."""
    values: list[str] = []
    has_object = False
    for each in types:
        if isinstance(each, inspect.LiteralType):
            values += [str(value) or '""' for value in each.values]
        has_object |= isinstance(each, inspect.StructType | inspect.DictType)
    values += ["an object"] if has_object and values else []
    if not values:
        return ""
    return "; it may be " + " or ".join(filter(None, (", ".join(values[:-1]), values[-1])))


@cache
def _type_info(kind: Any) -> inspect.Type:
    return inspect.type_info(kind)


def _types_at(kind: Any, path: str) -> Iterator[inspect.Type]:
    """Yield the types that the value at `path`, such as messages[0].role, may have."""
    types = list(_alternatives(_type_info(kind)))
    for step in re.findall(r"\w+|\[\]", re.sub(r"\[[^]]*", "[", path)):
        below = [each for one in types for each in _below(one, step)]
        types = [each for one in below for each in _alternatives(one)]
    yield from types


def _alternatives(type_: inspect.Type) -> Iterator[inspect.Type]:
    if isinstance(type_, inspect.UnionType):
        for each in type_.types:
            yield from _alternatives(each)
    elif isinstance(type_, inspect.Metadata):
        yield from _alternatives(type_.type)
    else:
        yield type_


def _below(type_: inspect.Type, step: str) -> Iterator[inspect.Type]:
    """Yield the types of the field, or "[]" the items, of a value of this type."""
    if isinstance(type_, inspect.StructType):
        if step == type_.tag_field:
            yield inspect.LiteralType((type_.tag,))
        yield from (field.type for field in type_.fields if field.encode_name == step)
    elif step == "[]" and isinstance(type_, inspect.ListType):
        yield type_.item_type
    elif step == "[]" and isinstance(type_, inspect.DictType):
        yield type_.value_type
