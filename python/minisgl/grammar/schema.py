"""Walks JSON schemas, and turns them into schemas of the same meaning that llguidance implements.

llguidance refuses a `format` that it does not know, which JSON Schema calls an annotation, and a
`oneOf` unless it can prove itself that its schemas exclude one another.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any, Final
from urllib.parse import unquote

from minisgl.grammar.disjoint import Disjointness

FORMATS: Final = (
    *("date-time", "time", "date", "duration", "email", "hostname"),
    *("ipv4", "ipv6", "uuid", "uri"),
)
"""The formats that llguidance enforces (its docs/json_schema.md)."""
DATA: Final = frozenset(("const", "enum", "default", "examples", "required", "dependentRequired"))
"""Keywords whose values are no schemas."""
NAMED: Final = frozenset(
    ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
)
"""Keywords with an object whose keys are names and whose values are schemas."""


def changed(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Return a schema after `change` of each of its objects, inner ones first.

    References may point anywhere, so objects below unknown keywords count as schemas too.
    """
    if isinstance(schema, list):
        return [changed(each, change) for each in schema]
    if not isinstance(schema, dict):
        return schema
    shown = {}
    for key, value in schema.items():
        if key in NAMED and isinstance(value, dict):
            value = {name: changed(part, change) for name, part in value.items()}
        elif key not in DATA:
            value = changed(value, change)
        shown[key] = value
    return change(shown)


def target(root: Any, reference: str) -> Any:
    """Return the part of a schema to which a reference in it points.

    Raises LookupError, TypeError or ValueError if there is none.
    """
    found = root
    for step in unquote(reference).split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        found = found[int(step)] if isinstance(found, list) else found[step]
    return found


def prepared(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema without unknown formats, and with `anyOf` for each `oneOf` whose schemas
    exclude one another."""
    proof = Disjointness(root=schema, target=target)

    def change(part: dict[str, Any]) -> dict[str, Any]:
        if isinstance(part.get("format"), str) and part["format"] not in FORMATS:
            part = {key: value for key, value in part.items() if key != "format"}
        branches = part.get("oneOf")
        if not isinstance(branches, list):
            return part
        rest = {key: value for key, value in part.items() if key != "oneOf"}
        if not all(proof.holds([a, rest], [b, rest]) for a, b in combinations(branches, 2)):
            return part
        if "anyOf" in part:
            return {**rest, "allOf": [*rest.get("allOf", ()), {"anyOf": branches}]}
        return {"anyOf" if key == "oneOf" else key: value for key, value in part.items()}

    prepared_schema: dict[str, Any] = changed(schema, change)
    return prepared_schema
