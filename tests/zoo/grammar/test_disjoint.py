"""Two schemas that are proved to exclude each other have no valid value in common."""

from __future__ import annotations

import random
import time
from itertools import combinations
from typing import Any

import jsonschema
import pytest

from minisgl_zoo.grammar.disjoint import Disjointness
from minisgl_zoo.grammar.schema import prepared, target

VALUES: list[Any] = [
    *(None, True, 0, 1, 1.0, 1.5, "a", "b", [], [1], {}, {"k": "a"}, {"k": "b"}, {"k": 1}),
    *({"k": True}, {"k": "a", "x": 1}, {"x": 1}, {"x": "a"}, {"k": None}, {"k": {"k": "a"}}),
]
ROOT = {
    "$defs": {
        "a": {"type": "object", "properties": {"k": {"const": "a"}}, "required": ["k"]},
        "b": {"type": "object", "properties": {"k": {"enum": ["b", 1]}}, "required": ["k"]},
        "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {"type": "integer"}]},
    }
}


def drawn(rng: random.Random, depth: int = 2) -> Any:
    """A random schema."""
    schema: dict[str, Any] = {}
    for keyword in rng.sample(
        ["type", "const", "enum", "properties", "required", "closed", "anyOf", "allOf", "$ref"],
        rng.randint(0, 3),
    ):
        match keyword:
            case "type":
                kinds = ["null", "boolean", "integer", "number", "string", "array", "object"]
                schema["type"] = rng.choice([rng.choice(kinds), rng.sample(kinds, 2), "object"])
            case "const":
                schema["const"] = rng.choice(VALUES)
            case "enum":
                schema["enum"] = rng.sample(VALUES, 2)
            case "required":
                schema["required"] = rng.choice([["k"], ["x"], ["k", "x"]])
            case "closed":
                schema["additionalProperties"] = rng.choice([False, True, {"type": "integer"}])
            case "$ref":
                schema["$ref"] = f"#/$defs/{rng.choice('ab')}"
            case _ if not depth:
                continue
            case "properties":
                names = rng.sample(["k", "x"], rng.randint(1, 2))
                schema["properties"] = {name: drawn(rng, depth - 1) for name in names}
            case _:
                schema[keyword] = [drawn(rng, depth - 1) for _ in range(2)]
    return rng.choice([schema, schema, schema, True]) if depth < 2 else schema


def test_a_proof_is_never_wrong() -> None:
    rng, proved = random.Random(1), 0
    for _ in range(2000):
        first, second = drawn(rng), drawn(rng)
        if Disjointness(root=ROOT, target=target).holds([first], [second]):
            proved += 1
            one, other = (
                jsonschema.Draft202012Validator({**each, **ROOT}) for each in (first, second)
            )
            assert not [v for v in VALUES if one.is_valid(v) and other.is_valid(v)], (first, second)
    assert proved > 200


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ({"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}, True),
        ({"$ref": "#/$defs/loop"}, {"type": "string"}, False),  # the loop ends the search
        ({"$ref": "#/nowhere"}, {"type": "string"}, False),
        ({"const": 1}, {"const": 1.0}, False),
        ({"const": 1}, {"const": True}, True),
        ({"const": [1]}, {"const": [True]}, True),
        ({"type": "integer"}, {"type": "number"}, False),
        ({"anyOf": [{"const": 1}, {"const": 2}]}, {"enum": [3, 4]}, True),
        (False, {}, True),
        ("no schema", {}, False),
    ],
)
def test_proofs(first: Any, second: Any, expected: bool) -> None:
    assert Disjointness(root=ROOT, target=target).holds([first], [second]) is expected


def test_the_search_is_bounded() -> None:
    """1,000 schemas that exclude one another by no property, and 12 unions of 12 in each of two."""
    union = {"anyOf": [{"type": ["string", "null"]}] * 12}
    many = [{"type": "object", "properties": {"k": {"const": i}}} for i in range(1000)]
    start = time.process_time()
    assert "oneOf" in prepared({"oneOf": many})
    assert "oneOf" in prepared({"oneOf": [{"allOf": [union] * 12}, {"allOf": [union] * 12}]})
    assert time.process_time() - start < 5
    shapes = [
        {"type": "object", "properties": {"k": {"const": i}}, "required": ["k"]} for i in range(60)
    ]
    assert len(list(combinations(shapes, 2))) == 1770
    assert "anyOf" in prepared({"oneOf": shapes})
    node = {
        "type": "object",
        "properties": {"next": {"$ref": "#/$defs/node"}},
        "required": ["next"],
    }
    assert "oneOf" in prepared({"$defs": {"node": node}, "oneOf": [{"$ref": "#/$defs/node"}] * 2})
