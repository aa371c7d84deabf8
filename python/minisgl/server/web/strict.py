"""Records of JSON that ignore no field in silence.

A field is honoured, or it is marked `only` or `ignored`. `only` lists the values that change
nothing, and refuses all others with a hint; `ignored` accepts every value. A field that a record
does not have is refused by name. The table in docs/api.md lists all fields; a test compares it with
the records.

Why not pydantic: `msgspec` decodes and checks types and bounds in one pass over the bytes, its
errors name the path, and it is as strict as JSON (no NaN, no invalid UTF-8, no "5" for 5).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
from msgspec import Meta

from minisgl.errors import InvalidRequest


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


@cache
def _restricted(struct: type[Json]) -> tuple[tuple[str, tuple[Any, ...], str], ...]:
    """Return (field, neutral values, reason) of each field marked `only`."""
    return tuple(
        (field.name, meta.extra["only"], meta.extra["why"])
        for field in msgspec.structs.fields(struct)
        for meta in getattr(field.type, "__metadata__", ())
        if isinstance(meta, Meta) and meta.extra and "only" in meta.extra
    )
