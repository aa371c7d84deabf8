"""160 JSON schemas of the kinds that JSONSchemaBench (2025) has, with bounds of at most 8.

Strings and arrays are bounded and objects closed, so an answer of a bad model ends too.
"""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string", "maxLength": 8}
INTEGER: Schema = {"type": "integer", "minimum": -99, "maximum": 99}
FLAG: Schema = {"type": "boolean"}


def closed(*, optional: tuple[str, ...] = (), **properties: Schema) -> Schema:
    """A closed object; all properties but the optional ones are required."""
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name not in optional],
        "additionalProperties": False,
    }


def listed(items: Schema, least: int = 0, most: int = 3) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def schemas() -> dict[str, Schema]:
    """The schemas by name."""
    found: dict[str, Schema] = {}

    def add(kind: str, *each: Schema) -> None:
        first = sum(name.startswith(f"{kind}-") for name in found)
        found.update({f"{kind}-{first + i}": schema for i, schema in enumerate(each)})

    leaves = [TEXT, INTEGER, FLAG, {"type": "null"}, {"enum": ["red", 2, None]}]
    add("leaf", *leaves, *({"type": ["null", leaf["type"]], **leaf} for leaf in leaves[:1]))
    add("object", *(closed(value=leaf) for leaf in leaves))
    add("object", *(closed(a=a, b=b, optional=("b",)) for a, b in product(leaves, repeat=2)))
    add("list", *(listed(leaf, least, 4) for leaf, least in product(leaves, (0, 2))))
    add("list", {"type": "array", "prefixItems": [TEXT, INTEGER], "items": False, "minItems": 2})
    add("list", {"type": "array", "prefixItems": [FLAG], "items": INTEGER, "maxItems": 4})

    for depth in range(1, 9):
        nested = TEXT
        for level in range(depth):
            nested = closed(**{f"level_{level}": nested, "flag": FLAG})
        add("nesting", nested)
    add("nesting", *(listed(listed(leaf, 1, 2), 1, 2) for leaf in leaves))
    add("nesting", *(listed(closed(item=leaf, count=INTEGER), 0, 2) for leaf in leaves))

    add("enum", *({"enum": [f"value {i}" for i in range(count)]} for count in (1, 2, 8, 40)))
    add("enum", {"const": "always"}, {"const": 7}, {"const": None}, closed(kind={"const": "a"}))
    add("enum", {"enum": ['quote "', "back\\slash", "new\nline", "ü", "漢字", "🙂"]})
    add("enum", {"enum": [[1, 2], {"a": 1}, "x"]}, closed(color={"enum": ["red", "green"]}))

    add("anyOf", *({"anyOf": [a, b]} for a, b in pairwise(leaves)))
    add("anyOf", *(closed(value={"anyOf": [leaf, {"type": "null"}]}) for leaf in leaves))
    add("anyOf", {"anyOf": [closed(a=TEXT), closed(b=INTEGER), closed(c=FLAG)]})
    add("anyOf", {"anyOf": [listed(INTEGER), closed(only=TEXT)]})
    add("union", {"type": ["integer", "null"], "minimum": 0, "maximum": 9})
    add("union", {"type": ["boolean", "null"]}, closed(x={"type": ["boolean", "null"]}))
    shapes = [closed(kind={"const": name}, size=INTEGER) for name in ("circle", "square", "line")]
    add(
        "union", {"oneOf": shapes}, listed({"oneOf": shapes}, 1, 3), closed(shape={"oneOf": shapes})
    )
    add("union", {"allOf": [{"type": "object"}, closed(a=TEXT)]})
    add("union", {"allOf": [closed(a=TEXT, b=INTEGER), {"required": ["a"]}]})

    patterns = (
        r"^[a-z]{1,8}$", r"^\d{3}-\d{4}$", r"^(yes|no)$", r"^[A-Z][a-z]{0,7}$", r"^#[0-9a-f]{6}$",
        r"^v\d+\.\d{1,2}$", r"^(ab){1,4}$", r"^[^\"\\]{1,8}$", r"^\w{1,8}$", r"^.{2,4}$",
    )  # fmt: skip
    add("pattern", *({"type": "string", "pattern": p} for p in patterns))
    add("pattern", *(closed(code={"type": "string", "pattern": p}) for p in patterns[:5]))
    add("pattern", {"type": "string", "pattern": "^[ab]+$", "minLength": 2, "maxLength": 6})
    formats = ("date", "time", "date-time", "ipv4", "ipv6", "uuid", "email", "hostname", "duration")
    add("format", *({"type": "string", "format": name} for name in formats))
    add("format", *(closed(when={"type": "string", "format": name}) for name in formats[:3]))

    for low, high in ((0, 0), (0, 8), (-8, 8), (3, 1000), (-1000, -3)):
        add("bounds", {"type": "integer", "minimum": low, "maximum": high})
        add("bounds", {"type": "number", "minimum": low, "maximum": high})
    add("bounds", {"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 4})
    add("bounds", {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100})
    for least, most in ((0, 1), (1, 1), (2, 5), (8, 8)):
        add("bounds", {"type": "string", "minLength": least, "maxLength": most})
        add("bounds", listed(FLAG, least, most))

    tree = closed(name=TEXT, children=listed({"$ref": "#/$defs/tree"}, 0, 2))
    add("recursion", {"$defs": {"tree": tree}, "$ref": "#/$defs/tree"})
    chain = closed(value=INTEGER, next={"anyOf": [{"type": "null"}, {"$ref": "#/$defs/chain"}]})
    add("recursion", {"$defs": {"chain": chain}, "$ref": "#/$defs/chain"})
    for leaf in leaves:
        either = {"anyOf": [leaf, closed(left={"$ref": "#/$defs/e"}, right={"$ref": "#/$defs/e"})]}
        add("recursion", {"$defs": {"e": either}, "$ref": "#/$defs/e"})
    shared = {"$defs": {"point": closed(x=INTEGER, y=INTEGER)}}
    add("reference", {**shared, **closed(a={"$ref": "#/$defs/point"}, b={"$ref": "#/$defs/point"})})
    add("reference", {**shared, **listed({"$ref": "#/$defs/point"}, 1, 3)})
    add("reference", {"definitions": {"t": TEXT}, **closed(t={"$ref": "#/definitions/t"})})

    for pattern in ("^[a-z]{1,8}$", "^x_[0-9]{1,3}$"):
        properties = {"patternProperties": {pattern: INTEGER}, "additionalProperties": False}
        add(
            "map",
            {"type": "object", **properties},
            {"type": "object", "maxProperties": 2, **properties},
        )
    add("tool", closed(city=TEXT, unit={"enum": ["celsius", "fahrenheit"]}, optional=("unit",)))
    add("tool", closed(query=TEXT, limit={"type": "integer", "minimum": 1, "maximum": 50}))
    add("tool", closed(name=TEXT, age=INTEGER, tags=listed(TEXT), address=closed(street=TEXT)))
    return found
