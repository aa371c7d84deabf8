"""Walks JSON schemas, and turns them into schemas of the same meaning that llguidance implements.

llguidance refuses a `format` that it does not know, which JSON Schema calls an annotation; keywords
that it does not implement, even where they allow everything; and `oneOf`, unless it can prove that
its schemas exclude one another, for which it follows no reference.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any, Final
from urllib.parse import unquote

from minisgl_zoo.grammar.disjoint import Disjointness

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


NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "uniqueItems": (False,),
    "not": (False,),
    **dict.fromkeys(("unevaluatedProperties", "unevaluatedItems"), (True, {})),
    "propertyNames": (True, {}, {"type": "string"}),  # the last is what zod writes of a record
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), ({},)),
}
"""Values with which keywords that llguidance does not implement allow everything."""
_NEEDS: Final = {
    "minContains": "contains",
    "maxContains": "contains",
    "then": "if",
    "else": "if",
}
"""Keywords that mean nothing without another one."""
_TOGETHER: Final = ("allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "if", "not")
"""Keywords of schemas that may evaluate properties of the same object."""


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
    """Return the schema without keywords that allow everything, unknown formats among them; with
    `anyOf` for `oneOf` if its schemas exclude one another; and with `additionalProperties` for
    `unevaluatedProperties` if no other schema describes the object."""
    proof = Disjointness(root=schema, target=target)

    def change(part: dict[str, Any]) -> dict[str, Any]:
        part = {key: value for key, value in part.items() if not _says_nothing(part, key)}
        closes = not {*_TOGETHER, "dependentSchemas", "additionalProperties"} & part.keys()
        if closes and "unevaluatedProperties" in part:
            part["additionalProperties"] = part.pop("unevaluatedProperties")
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


def _says_nothing(schema: dict[str, Any], key: str) -> bool:
    value = schema[key]
    if key == "format":
        return isinstance(value, str) and value not in FORMATS
    if key in _NEEDS:
        return _NEEDS[key] not in schema
    if key == "if":
        return not {"then", "else"} & schema.keys()
    return value in NEUTRAL.get(key, ())
