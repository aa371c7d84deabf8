"""Records of JSON that ignore no field in silence.

A field is honoured, or it is marked `only` or `ignored`. `only` lists the values that change
nothing, and refuses all others with a hint; `ignored` accepts every value. A field that a record
does not have is refused by name. The table in docs/api.md lists all fields; a test compares it with
the records.

Why not pydantic: `msgspec` decodes and checks types and bounds in one pass over the bytes, its
errors name the path, and it is as strict as JSON (no NaN, no invalid UTF-8, no "5" for 5).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any, Final, Self

import msgspec

from minisgl import plugins
from minisgl.errors import InvalidRequest
from minisgl.utils.text import shortened


def only(*values: Any, why: str) -> msgspec.Meta:
    """Mark a field that must be null or one of `values`, which change nothing.

    why: the reason, or what to do instead.
    """
    description = f"Only {_listed(values)}: {why}."
    return msgspec.Meta(description=description, extra={"only": values, "why": why})


def _listed(values: tuple[Any, ...]) -> str:
    return " or ".join(["null", *(msgspec.json.encode(value).decode() for value in values)])


def ignored(why: str) -> msgspec.Meta:
    """Mark a field that accepts every value and changes nothing. why: its description."""
    return msgspec.Meta(description=why, extra={"ignored": True})


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
        if isinstance(meta, msgspec.Meta) and meta.extra and "only" in meta.extra
    )


# --- errors of msgspec about a request's fields, as refusals that say what was expected ----------

MAX_NAME: Final = 64  # characters of an unknown field's name that an error repeats

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

FieldHint = Callable[[Any, str, str | None, bool], str]
"""A row of the table `flag_hints`: from the type of a body, the path in it, the name of an unknown
field there (None: a known one has a wrong value), and whether it is the body's own, to the end of
the error."""


@cache
def _hints() -> FieldHint:
    found: FieldHint | None = plugins.find("flag_hints", "fields")
    return found or (lambda *_: "; GET /openapi.json lists the fields and their values")


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
    unknown = _UNKNOWN.match(text)
    hint = ""
    if unknown or text.startswith("Invalid "):
        hint = _hints()(kind, inner, unknown[1] if unknown else None, not path)
    if unknown:
        name = prefix + shortened(unknown[1], MAX_NAME)
        return InvalidRequest(f"the field {name} is not known here{hint}", param=name)
    hint = "; 0 and -1 are for all" if inner.endswith("top_k") else hint
    text = _EXPECTED.sub(_in_words, shortened(text, 300))
    if not path:
        return InvalidRequest(f"the body must be a JSON object: {text}")
    return InvalidRequest(f"{path}: {text}{hint}", param=path)


def _in_words(found: re.Match[str]) -> str:
    """Return "expected an integer or null, got a string" for "Expected `int | null`, got `str`"."""
    names = [_TYPES.get(name, name) for name in found[1].split(" | ")]
    expected = " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))
    if not found[3]:
        return f"expected {expected}"
    got = "a decimal number" if found[3] == "float" else _TYPES.get(found[3], found[3])
    return f"expected {expected}{found[2]}, got {got}"
