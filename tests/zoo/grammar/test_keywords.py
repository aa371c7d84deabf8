"""Each keyword of JSON Schema is enforced as `jsonschema` judges, or refused as docs/api.md
says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import llguidance
import pytest

from minisgl.errors import InvalidSampling
from minisgl_zoo.grammar.compile import check_schemas, joined, json_grammar
from minisgl_zoo.grammar.trial import LIMITS

PAGE = Path(__file__).parents[3] / "docs/api.md"
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 5, 7, 10, 100, 1.5, 0.25, -2.5, 12.75),
    *("", "a", "ab", "abc", "abcdef", "red", "x-1", "é", "A1", 'q"\\', "line\nbreak"),
    *("2024-01-31", "2024-13-01", "12:30:00Z", "2024-01-31T12:30:00Z", "P1D", "x@y.org"),
    *("10.0.0.1", "::1", "http://x.org/a?b#c", "6ba7b810-9dad-11d1-80b4-00c04fd430c8", "not a uri"),
    *([], [1], [1, 2], [1, 2, 3], ["a"], ["a", 1], [[1]], [None, True], [1, "a"], [1, 1]),
    *({}, {"a": 1}, {"a": "x"}, {"b": 1}, {"a": 1, "b": 2}, {"a": 1, "b": "x"}, {"a": {"a": 1}}),
    *({"kind": "c", "r": 1}, {"kind": "s", "w": 1}, {"kind": "c"}, {"kind": "c", "w": 1}, {"r": 1}),
    *({"a": [1]}, {"x-1": 1}, {"x-1": "s"}, {"a": None}, {"next": {"next": {}}}, {"z": {"a": 1}}),
]  # fmt: skip
S, N, D = {"type": "string"}, {"type": "integer"}, {"type": "object"}
A, B = {"properties": {"a": N}}, {"properties": {"b": N}}
CIRCLE = {**D, "properties": {"kind": {"const": "c"}, "r": N}, "required": ["kind"]}
SQUARE = {**D, "properties": {"kind": {"const": "s"}, "w": N}, "required": ["kind"]}
DRAFT7 = {"$schema": "http://json-schema.org/draft-07/schema#"}
ENFORCED: dict[str, Any] = {
    "any": {},
    "true": True,
    **{f"type {kind}": {"type": kind} for kind in
       ("null", "boolean", "integer", "number", "string", "array", "object")},
    "types": {"type": ["integer", "null", "array"]},
    "const": {"const": {"a": 1, "b": "x"}},
    "const number": {"const": 1.5},
    "enum": {"enum": ["red", 2, None, [1, 2], {"a": 1}]},
    "enum beside type": {"type": "string", "enum": ["red", 3, "abc"]},
    "minimum": {**N, "minimum": 2},
    "maximum": {"type": "number", "maximum": 1.5},
    "exclusive": {"type": "number", "exclusiveMinimum": 0.25, "exclusiveMaximum": 7},
    "exclusive, draft 4": {"$schema": "http://json-schema.org/draft-04/schema#", **N, "minimum": 2,
                           "exclusiveMinimum": True},
    "multipleOf": {**N, "multipleOf": 5},
    "multipleOf of a fraction": {"type": "number", "multipleOf": 0.5},
    "bounds of any type": {"minimum": 3, "minLength": 2, "minItems": 1},
    "minLength": {**S, "minLength": 2},
    "maxLength": {**S, "maxLength": 1},
    "pattern": {**S, "pattern": "^[a-c]+$"},
    "pattern in the middle": {**S, "pattern": "b"},
    "pattern and length": {**S, "pattern": "^a", "maxLength": 2},
    **{f"format {name}": {**S, "format": name} for name in
       ("date", "time", "date-time", "duration", "email", "ipv4", "ipv6", "uuid", "uri")},
    **{f"annotation {name}": {**S, "format": name} for name in ("color", "int32", "x-own")},
    "format of any type": {"format": "date"},
    "annotations": {**N, "title": "t", "description": "d", "default": 1, "examples": [2],
                    "deprecated": True, "readOnly": True, "writeOnly": True, "$comment": "c"},
    "content": {**S, "contentEncoding": "base64", "contentMediaType": "a/b", "contentSchema": N},
    "unknown keywords": {**N, "nullable": True, "x-own": 1, "discriminator": {"propertyName": "k"}},
    "neutral values": {"type": ["array", "object"], "uniqueItems": False, "propertyNames": {},
                       "unevaluatedItems": True, "dependentRequired": {}, "not": False,
                       "minContains": 3, "then": N},
    "names are texts": {**D, "propertyNames": {"type": "string"}, "additionalProperties": N},
    "items": {"type": "array", "items": N},
    "items false": {"type": "array", "items": False},
    "prefixItems": {"type": "array", "prefixItems": [N, S], "items": False},
    "prefixItems, draft 7": {**DRAFT7, "type": "array", "items": [S, N], "additionalItems": False},
    "number of items": {"type": "array", "minItems": 1, "maxItems": 2},
    "properties": {**D, "properties": {"a": N, "b": N}},
    "required": {**D, **A, "required": ["a"]},
    "required only": {**D, "required": ["a"]},
    "additionalProperties": {**D, **A, "additionalProperties": False},
    "additionalProperties of a type": {**D, "additionalProperties": N},
    "patternProperties": {**D, "patternProperties": {"^x-": S}, "additionalProperties": False},
    "number of properties": {**D, "minProperties": 1, "maxProperties": 1},
    "number beside required ones": {**D, **A, "required": ["a"], "minProperties": 2},
    "unevaluatedProperties": {**D, **A, "unevaluatedProperties": False},
    "allOf": {**D, "allOf": [A, {**B, "required": ["b"]}]},
    "allOf of bounds": {"allOf": [{**N, "minimum": 2}, {"maximum": 5}]},
    "anyOf": {"anyOf": [N, {**S, "maxLength": 1}]},
    "anyOf beside": {**D, "required": ["a"], "anyOf": [A, {"properties": {"a": S}}]},
    "oneOf of types": {"oneOf": [N, S, {"type": "null"}]},
    "oneOf of values": {"oneOf": [{"const": 1}, {"const": 2}, {"enum": ["red", 3]}]},
    "oneOf by a discriminator": {"oneOf": [CIRCLE, SQUARE]},
    "oneOf by reference": {"$defs": {"c": CIRCLE, "s": SQUARE},
                           "oneOf": [{"$ref": "#/$defs/c"}, {"$ref": "#/$defs/s"}]},
    "oneOf beside a type": {**D, "required": ["kind"], "oneOf": [
        {"properties": {"kind": {"const": "c"}}}, {"properties": {"kind": {"enum": ["s"]}}}]},
    "oneOf and anyOf": {"anyOf": [{"minimum": 2}, {"minLength": 2}], "oneOf": [N, S]},
    "oneOf of closed objects": {"oneOf": [
        {**D, **A, "required": ["a"], "additionalProperties": False},
        {**D, **B, "required": ["b"], "additionalProperties": False}]},
    "$ref": {"$defs": {"n": N}, "type": "array", "items": {"$ref": "#/$defs/n"}},
    "$ref into a property": {**D, "properties": {"a": N, "b": {"$ref": "#/properties/a"}}},
    "$ref beside": {"$defs": {"n": N}, "$ref": "#/$defs/n", "minimum": 3},
    "$ref to itself": {**D, "properties": {"next": {"$ref": "#"}}, "additionalProperties": False},
    "$anchor": {"$defs": {"n": {"$anchor": "num", **N}}, "$ref": "#num"},
    "definitions": {**DRAFT7, "definitions": {"n": N}, "$ref": "#/definitions/n"},
    "keywords of a later draft": {**DRAFT7, **D, "dependentRequired": {"a": ["b"]}},
    "data like a schema": {"const": {"a": 1}, "default": {"format": "x", "oneOf": [{}, {}]}},
    "a property named oneOf": {**D, "properties": {"oneOf": N, "format": S, "a": N}},
}  # fmt: skip
FORMATS = jsonschema.FormatChecker()
for name, right in {  # which jsonschema checks only with further packages
    "time": "12:30:00Z",
    "date-time": "2024-01-31T12:30:00Z",
    "duration": "P1D",
    "uri": "http://x.org/a?b#c",
}.items():
    FORMATS.checks(name)(right.__eq__)
NOT_HERE = "a schema cannot have"
REFUSED: dict[str, tuple[Any, str]] = {
    **{
        key: ({key: value}, NOT_HERE)
        for key, value in {
            "not": N, "contains": N, "uniqueItems": True, "propertyNames": {"pattern": "^a"},
            "unevaluatedItems": False, "dependentRequired": {"a": ["b"]},
            "dependentSchemas": {"a": A}, "dependencies": {"a": ["b"]}, "$dynamicRef": "#a",
        }.items()
    },
    "if": ({"if": N, "then": {"minimum": 1}}, NOT_HERE),
    "false": (False, NOT_HERE),
    "unevaluatedProperties": ({**D, "allOf": [A], "unevaluatedProperties": False}, NOT_HERE),
    "minContains": ({"contains": N, "minContains": 2, "maxContains": 3}, NOT_HERE),
    "oneOf of numbers": ({"oneOf": [N, {"type": "number"}]}, "the schemas of oneOf"),
    "oneOf of equal values": ({"oneOf": [{"const": 1}, {"const": 1.0}]}, "the schemas of oneOf"),
    "oneOf without type": ({"oneOf": [A, B]}, "the schemas of oneOf"),
    "oneOf by an optional property": (
        {"oneOf": [{**CIRCLE, "required": []}, {**SQUARE, "required": []}]}, "the schemas of"),
    "minProperties": ({**D, **A, "minProperties": 1}, "min/maxProperties only"),
    "patternProperties": ({**D, "patternProperties": {"^a": N, "b$": S}}, "patternProperty"),
    "look-around": ({**S, "pattern": "(?=a)b"}, "not supported"),
    "word boundary": ({**S, "pattern": r"\bfoo"}, "not supported"),
    "pattern": ({**S, "pattern": "(("}, "regex parse error"),
    "bounds": ({**N, "minimum": 5, "maximum": 3}, "Unsatisfiable schema"),
    "allOf": ({"allOf": [S, N]}, "Unsatisfiable schema"),
    "enum": ({"enum": []}, "Unsatisfiable schema"),
    "circle": ({"$ref": "#/$defs/n", "$defs": {
        "n": {**D, "properties": {"n": {"$ref": "#/$defs/n", "minProperties": 0}}}
    }}, "circular references"),
    "endless": ({"$ref": "#"}, "no text matches it"),
    "other document": ({"$ref": "http://example.com/s"}, "Default retriever"),
    "no place": ({"$ref": "#/nowhere"}, "Pointer"),
    "type": ({"type": "text"}, "Invalid type"),
    "wrong value": ({**S, "minLength": "2"}, "Expected"),
    "multipleOf": ({"type": "number", "multipleOf": 1e-20}, "Value for 'multipleOf'"),
    "large bound": ({**N, "minimum": 2**70}, "Failed to generate"),
    "time": ({**N, "multipleOf": 999_983}, "it takes more than 0.3 s"),
}  # fmt: skip


def test_there_are_enough() -> None:
    assert len(ENFORCED) >= 60
    assert len(REFUSED) >= 30


@pytest.mark.parametrize("name", ENFORCED)
def test_a_keyword_is_enforced(name: str) -> None:
    """Each value is accepted exactly if it is valid."""
    schema = ENFORCED[name]
    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    judge = kind(schema, format_checker=FORMATS)
    check_schemas({"schema": schema})
    grammar = joined(json_grammar(schema))
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar, limits=LIMITS)
    judged = [(value, judge.is_valid(value)) for value in VALUES]
    found = [(value, accepts(matcher.deep_copy(), value)) for value in VALUES]
    assert found == judged
    assert any(valid for _, valid in judged)


def accepts(matcher: llguidance.LLMatcher, value: Any) -> bool:
    text = json.dumps(value, ensure_ascii=False).encode()
    return matcher.try_consume_tokens(list(text)) == len(text) and matcher.is_accepting()


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_is_in_the_docs(name: str) -> None:
    schema, says = REFUSED[name]
    with pytest.raises(InvalidSampling) as raised:
        check_schemas({"schema": schema})
    reason = raised.value.message.partition(" cannot be used: ")[2]
    assert says in reason
    assert any(re.fullmatch(line, reason) for line in documented()), reason


def documented() -> list[str]:
    """The sentences of the page as regexes."""
    rows = PAGE.read_text().partition("### Refused")[2].splitlines()
    lines = [row.split(" | ")[1].removesuffix(" |") for row in rows if row.startswith("| ")][1:]
    assert len(lines) > 15
    escaped = (re.escape(line).replace("KEYWORDS", ".+") for line in lines)
    return [re.sub(r"(\\ )?\\\.\\\.\\\.(\\ )?", ".*", line) for line in escaped]
