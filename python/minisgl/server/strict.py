"""Records of JSON that ignore no field in silence.

A field is honoured, or it is marked `only` or `ignored`. `only` lists the values that change
nothing, and refuses all others with a hint; `ignored` accepts every value. A field that a record
does not have is refused by name. The table in docs/api.md lists all fields; a test compares it with
the records.

Why not pydantic: `msgspec` decodes and checks types and bounds in one pass over the bytes, its
errors name the path, and it is as strict as JSON (no NaN, no invalid UTF-8, no "5" for 5).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any, Final, Self

import msgspec
from msgspec import Meta, inspect

from minisgl.errors import InvalidRequest
from minisgl.utils.text import shortened


def only(*values: Any, why: str) -> Meta:
    """Mark a field that must be null or one of `values`, which change nothing.

    why: the reason, or what to do instead.
    """
    description = f"Only {_listed(values)}: {why}."
    return Meta(description=description, extra={"only": values, "why": why})


def _listed(values: tuple[Any, ...]) -> str:
    return " or ".join(["null", *(msgspec.json.encode(value).decode() for value in values)])


def ignored(why: str) -> Meta:
    """Mark a field that accepts every value and changes nothing. why: its description."""
    return Meta(description=why, extra={"ignored": True})


class Json(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    def refuse_unsupported(self, path: str = "") -> None:
        """Raise InvalidRequest if a field marked `only` has another value."""
        for name, values, why in _restricted(type(self)):
            value = getattr(self, name)
            # In Python False == 0, so the JSON types are compared too.
            if value is not None and not any(
                value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
                for neutral in values
            ):
                raise InvalidRequest(
                    f"{path}{name} is supported only as {_listed(values)}: {why}",
                    param=path + name,
                )

    def checked(self) -> Self:
        """Return the record of a request as it is used. Raises InvalidRequest."""
        self.refuse_unsupported()
        return self


@cache
def _restricted(struct: type[Json]) -> tuple[tuple[str, tuple[Any, ...], str], ...]:
    """Return (field, neutral values, reason) of each field marked `only`."""
    return tuple(
        (field.name, meta.extra["only"], meta.extra["why"])
        for field in msgspec.structs.fields(struct)
        for meta in getattr(field.type, "__metadata__", ())
        if isinstance(meta, Meta) and meta.extra and "only" in meta.extra
    )


# --- errors of msgspec about a request's fields, as refusals that say what was expected ----------

MAX_NAME: Final = 64  # characters of an unknown field's name that an error repeats
MAX_LISTED: Final = 8  # fields that an error lists

# msgspec's messages quote field names, and a client may send one that looks like a path. Only the
# path at the very end is msgspec's own.
_PATH = re.compile(r" - at `(?:key in )?\$\.?([\w.\[\]]*)`\Z")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`$")

_EXPECTED = re.compile(r"^Expected `(.*?)`(?:(.*), got `(.*)`)?")
_TYPES: Final = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "a boolean",
    "array": "an array",
    "object": "an object",
}
"""Names of JSON's types, by msgspec's. Its null is null."""

_SYNONYMS: Final = {
    "max_new_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "stop_sequences": "stop",
    "stop_strings": "stop",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "stop": "stop_sequences",
    "messages": "input",
}
"""Other APIs' names of our fields."""


def field_error(text: str, kind: Any, within: str = "") -> InvalidRequest:
    """Return a refusal for msgspec's "Expected `int`, got `str` - at `$.max_tokens`".

    kind: the type that was expected. within: its path in the request's body; "" is the body itself.
    """
    found = _PATH.search(text)
    inner = found[1] if found else ""
    path = ".".join(filter(None, (within, inner)))
    text = text[: found.start()] if found else text
    prefix = f"{path}." if path else ""
    if missing := _MISSING.match(text):
        name = prefix + missing[1]
        return InvalidRequest(f"the field {name} is missing", param=name)
    types = list(_types_at(kind, inner))
    if unknown := _UNKNOWN.match(text):
        name = prefix + shortened(unknown[1], MAX_NAME)
        known = list(dict.fromkeys(field for each in types for field in _field_names(each)))
        hint = ""
        if near := _similar(unknown[1], known):
            hint = f"; did you mean {near}?"
        elif path and 0 < len(known) <= MAX_LISTED:
            hint = f"; known are {', '.join(known)}"
        return InvalidRequest(f"the field {name} is not known here{hint}", param=name)
    hint = _accepted(types) if text.startswith("Invalid ") else ""
    hint = "; 0 and -1 are for all" if inner.endswith("top_k") else hint
    text = _EXPECTED.sub(_in_words, shortened(text, 300))
    if not path:
        return InvalidRequest(f"the body must be a JSON object: {text}")
    return InvalidRequest(f"{path}: {text}{hint}", param=path)


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
    return next(iter(difflib.get_close_matches(given[: MAX_NAME + 1], known, 1, 0.85)), "")


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


def _in_words(found: re.Match[str]) -> str:
    """Return "expected an integer or null, got a string" for "Expected `int | null`, got `str`"."""
    names = [_TYPES.get(name, name) for name in found[1].split(" | ")]
    expected = " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))
    if not found[3]:
        return f"expected {expected}"
    got = "a decimal number" if found[3] == "float" else _TYPES.get(found[3], found[3])
    return f"expected {expected}{found[2]}, got {got}"
