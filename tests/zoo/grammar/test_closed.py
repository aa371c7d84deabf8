"""Objects of a tool's arguments have the properties that their schema declares, and no others."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import jsonschema
import pytest

from minisgl.errors import InvalidSampling
from minisgl_zoo.grammar.closed import closed
from minisgl_zoo.grammar.compile import check_schemas

X: dict[str, Any] = {"properties": {"x": {"type": "integer"}}}
BASE = {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]}
NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}
KIND = {"enum": ["a", "b"]}
CASES: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    (X, [{}, {"x": 1}], [{"y": 1}, {"x": 1, "y": 1}]),
    ({"properties": {}}, [{}], [{"y": 1}]),
    ({}, [{}, {"y": 1}], []),
    ({**X, "additionalProperties": True}, [{"y": 1}], []),
    ({**X, "additionalProperties": {"type": "null"}}, [{"y": None}], [{"y": 1}]),
    ({**X, "patternProperties": {"^y": {}}}, [{"y": 1}], []),
    ({**X, "required": ["y"]}, [{"y": 1}], [{"y": 1, "z": 1}]),
    ({**X, "required": ["x"], "minProperties": 2}, [{"x": 1, "y": 1}], []),
    ({"properties": {"o": X}}, [{"o": {"x": 1}}], [{"o": {"y": 1}}]),
    ({"properties": {"o": {"type": "object"}}}, [{"o": {"y": 1}}], [{"p": 1}]),
    (
        {"properties": {"l": {"type": "array", "items": X}}},
        [{"l": [{"x": 1}]}],
        [{"l": [{"y": 1}]}],
    ),
    ({"additionalProperties": X}, [{"any": {"x": 1}}], [{"any": {"y": 1}}]),
    # Several schemas of one object.
    ({**X, "allOf": [{"properties": {"y": {}}}]}, [{"x": 1, "y": 1}], [{"z": 1}]),
    ({"allOf": [X, {"properties": {"y": {}}}]}, [{"x": 1, "y": 1}], [{"z": 1}]),
    ({"allOf": [X, {"type": "object", "additionalProperties": True}]}, [{"z": 1}], []),
    ({"allOf": [X]}, [{"x": 1}], [{"z": 1}]),
    ({"anyOf": [X, {"properties": {"y": {}}}]}, [{"x": 1}, {"y": 1}], [{"x": 1, "y": 1}, {"z": 1}]),
    ({"anyOf": [X, {"type": "object"}]}, [{"z": 1}], []),
    (
        {**X, "anyOf": [{"properties": {"y": {}}}, {"required": ["x"]}]},
        [{"x": 1, "y": 1}, {"x": 1}],
        [{"z": 1}, {"x": 1, "z": 1}],
    ),
    (
        {
            "properties": {"kind": KIND},
            "required": ["kind"],
            "oneOf": [
                {"properties": {"kind": {"const": "a"}, "x": {}}},
                {"properties": {"kind": {"const": "b"}, "y": {}}},
            ],
        },
        [{"kind": "a", "x": 1}, {"kind": "b", "y": 1}],
        [{"kind": "a", "y": 1}, {"kind": "b", "z": 1}],
    ),
    # References.
    (
        {
            "$defs": {
                "outer": {"properties": {"x": {}}, "allOf": [{"$ref": "#/$defs/inner"}]},
                "inner": {"properties": {"y": {}}},
            },
            "properties": {"z": {}},
            "allOf": [{"$ref": "#/$defs/outer"}],
        },
        [{"x": 1, "y": 1, "z": 1}],
        [{"y": 1, "w": 1}],
    ),
    (
        {
            "$defs": {"a/b~c": {"properties": {"y": {}}}},
            "properties": {"x": {}},
            "allOf": [{"$ref": "#/$defs/a~1b~0c"}],
        },
        [{"x": 1, "y": 1}],
        [{"y": 1, "w": 1}],
    ),
    (
        {"$defs": {"base": BASE}, "properties": {"b": {"$ref": "#/$defs/base"}}},
        [{"b": {"id": 1}}],
        [{"b": {"id": 1, "z": 1}}],
    ),
    (
        {
            "$defs": {"base": BASE},
            "properties": {
                "b": {"$ref": "#/$defs/base"},
                "c": {"allOf": [{"$ref": "#/$defs/base"}, X]},
                "d": {"$ref": "#/$defs/base", **X},
                "e": {"anyOf": [{"$ref": "#/$defs/base"}, {"type": "null"}]},
            },
        },
        [{"b": {"id": 1}, "c": {"id": 1, "x": 1}, "d": {"id": 1, "x": 1}, "e": {"id": 1}}],
        [
            {"b": {"id": 1, "z": 1}},
            {"c": {"id": 1, "z": 1}},
            {"d": {"id": 1, "z": 1}},
            {"e": {"id": 1, "z": 1}},
        ],
    ),
    (
        {"$defs": {"node": NODE}, "properties": {"n": {"$ref": "#/$defs/node"}}},
        [{"n": {"next": {"next": {}}}}],
        [{"n": {"next": {"z": 1}}}],
    ),
    (
        {"properties": {"all": {"type": "array", "items": {"$ref": "#"}}}},
        [{"all": [{"all": []}]}],
        [{"all": [{"z": 1}]}],
    ),
    (  # llguidance refuses references in a circle with keywords beside them, so these stay open
        {
            "$defs": {"node": NODE},
            "properties": {"n": {"allOf": [{"$ref": "#/$defs/node"}, X]}},
        },
        [{"n": {"next": {}, "x": 1}}, {"n": {"next": {"z": 1}}}],
        [{"n": {"z": 1}}],
    ),
]


@pytest.mark.parametrize(("schema", "right", "wrong"), CASES, ids=lambda value: str(value)[:60])
def test_closed(schema: dict[str, Any], right: list[Any], wrong: list[Any]) -> None:
    """What it still allows was valid before."""
    schema = {"type": "object", **schema}
    result = closed(schema, "tools.f.parameters")
    before, after = (jsonschema.Draft202012Validator(each) for each in (schema, result))
    for value in right:
        assert before.is_valid(value)
        assert after.is_valid(value), (value, result)
    for value in wrong:
        assert not after.is_valid(value), (value, result)
    check_schemas({"tools.f.parameters": result})


def test_data_is_no_schema() -> None:
    """A value of const, enum, default or examples may look like a schema."""
    looks = {"properties": {"a": {}}, "$ref": "#/nowhere"}
    schema = {"type": "object", "properties": {"c": {"const": looks}, "d": {"default": looks}}}
    assert closed(schema, "p")["properties"] == schema["properties"]


def test_references_that_multiply_are_refused() -> None:
    """Each level refers to the next one twice: 2^40 schemas."""
    levels: dict[str, Any] = {
        f"l{i}": {
            "allOf": [{"$ref": f"#/$defs/l{i + 1}"}, {"anyOf": [{"$ref": f"#/$defs/l{i + 1}"}]}]
        }
        for i in range(40)
    }
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/l0"}}}
    schema["$defs"] = {**levels, "l40": X}
    result = closed(schema, "p")
    assert result["properties"]["a"] == {"$ref": "#/$defs/l0"}
    wide = {f"p{i}": {} for i in range(500)}
    branches = [{"properties": wide, "required": [f"p{i}"]} for i in range(500)]
    with pytest.raises(
        InvalidSampling, match="p cannot be used: references or branches make it too large"
    ):
        closed({"type": "object", "properties": {"b": {}}, "anyOf": branches}, "p")


def test_the_work_is_bounded() -> None:
    """Chains of references, each of which is met in a walk of its own, and large definitions."""
    chain: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(2000)}
    large = {"properties": {f"p{i}": {"properties": {"a": {}}} for i in range(2000)}}
    uses = {f"u{i}": {"$ref": f"#/$defs/l{i}"} for i in range(1000)}
    several = {f"l{i}": {**large, "allOf": [{"$ref": "#/$defs/l0"}]} for i in range(1, 5)}
    start = time.process_time()
    for schema in (
        {"$defs": {**chain, "d2000": X}, "allOf": [{"$ref": "#/$defs/d0"}, X]},
        {"$defs": {"l0": large, **several}, "properties": {"u": {"$ref": "#/$defs/l4"}}},
        {
            "$defs": {f"l{i}": large for i in range(1000)},
            "properties": uses,
            "allOf": [*uses.values()],
        },
    ):
        with contextlib.suppress(InvalidSampling):
            closed({"type": "object", **schema}, "p")
    assert time.process_time() - start < 10


def test_a_definition_that_nothing_needs_may_be_wrong() -> None:
    schema = {"type": "object", "$defs": {"a": {"allOf": [{"$ref": "#/nowhere"}, X]}}}
    with pytest.raises(InvalidSampling, match="p cannot be used: a part of it is no JSON schema"):
        closed(schema, "p")
