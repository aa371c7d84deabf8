"""Options that cannot be served are refused soon, and the refusal names the part."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from typing import Any

import pytest

from minisgl.core import SamplingParams
from minisgl.errors import InvalidSampling
from minisgl_zoo.grammar import trial
from minisgl_zoo.grammar.compile import compiled
from minisgl_zoo.grammar.forms import MAX_CHARACTERS


def refusal(option: Any, **others: Any) -> InvalidSampling:
    with pytest.raises(InvalidSampling) as caught:
        compiled(SamplingParams(structured_outputs=option, **others).structured_outputs or {})
    return caught.value


def in_object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


UNIQUE = {"type": "array", "uniqueItems": True}


@pytest.mark.parametrize(
    ("schema", "path", "says"),
    [
        (UNIQUE, "", "a schema cannot have uniqueItems here; leave that out, and check"),
        ({"if": {}, "then": {}}, "", "a schema cannot have if, then here"),
        (in_object(a={"type": "integer"}, b=UNIQUE), ".properties.b", "uniqueItems"),
        (in_object(a=in_object(b={"items": UNIQUE})), ".properties.a.properties.b.items", "unique"),
        ({"anyOf": [{"type": "null"}, in_object(b=UNIQUE)]}, ".anyOf.1.properties.b", "uniqueIt"),
        (
            {"$defs": {"d": in_object(b=UNIQUE)}, **in_object(a={"$ref": "#/$defs/d"})},
            ".$defs.d.properties.b",
            "uniqueItems",
        ),
        (in_object(a={"type": "strin"}), ".properties.a", "Invalid type: strin"),
        (in_object(a={"type": "string", "pattern": "(("}), ".properties.a", "unclosed group"),
        (in_object(a={"type": "string", "pattern": "(?=a)"}), ".properties.a", "look-around"),
        (in_object(a={"oneOf": [{"minLength": 1}, {}]}), ".properties.a", "or use anyOf"),
        (in_object(a={"$ref": "#/nowhere"}), ".properties.a", "does not exist"),
        (in_object(a={"$ref": "http://example.com/s"}), ".properties.a", "does not fetch"),
        (in_object(a={"not": {"type": "string"}}), ".properties.a", "not"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "", "minimum"),
    ],
)
def test_the_part_of_a_schema(schema: Any, path: str, says: str) -> None:
    error = refusal({"json": schema})
    assert error.param == f"structured_outputs.json{path}"
    assert error.message.startswith(f"{error.param} cannot be used: ")
    assert says in error.message


@pytest.mark.parametrize(
    ("option", "path", "says"),
    [
        ({"regex": "(("}, ".regex", "unclosed group"),
        ({"grammar": "start: nowhere"}, ".grammar", 'unknown name: "nowhere"'),
        ({"grammar": "root ::= nowhere"}, ".grammar", "nowhere"),
        ({"grammar": "root ::= root"}, ".grammar", "no text matches it"),
        ({"json": {"$ref": "#"}}, ".json", "no text matches it"),
        ({"grammar": 'start: "a'}, ".grammar", ""),
        ({"choice": []}, ".choice", "list of texts"),
        ({"choice": "abc"}, ".choice", "list of texts"),
        ({"choice": ["a", ""]}, ".choice", "list of texts"),
        ({"json": "{"}, ".json", "must be JSON"),
        ({"json": 3}, ".json", "must be an object"),
        ({"json": {"const": float("nan")}}, ".json", "no JSON"),
        ({"json": {"const": "\ud800"}}, ".json", "no JSON"),
        ({"json_object": False}, ".json_object", "must be True"),
        ({"regex": ""}, ".regex", "must be a text"),
        ({"regex": 3}, ".regex", "must be a text"),
        ({}, "", "exactly one of"),
        ({"json": {}, "regex": "a"}, "", "exactly one of"),
        ({"xml": "a"}, "", "exactly one of json, json_object, regex, choice, grammar"),
        ("json", "", "must be a dictionary"),
    ],
)
def test_wrong_options(option: Any, path: str, says: str) -> None:
    error = refusal(option)
    assert error.param == f"structured_outputs{path}"
    assert says in error.message


@pytest.mark.parametrize(
    "others", [{"ignore_eos": True}, {"min_tokens": 3}, {"allowed_token_ids": (1,)}]
)
def test_options_that_a_grammar_excludes(others: dict[str, Any]) -> None:
    assert "cannot be combined with" in refusal({"regex": "a"}, **others).message


def test_a_long_name_is_not_repeated() -> None:
    error = refusal({"json": in_object(**{"q" * 50_000: {"not": {}}})})
    assert error.message.startswith("structured_outputs.json.properties.qqq")
    assert "cannot have" in error.message
    assert len(error.message) < 700


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


PATTERNS = {"allOf": [{"type": "string", "pattern": f".*{c}.*{c}.*"} for c in "abcdefghijklmnop"]}


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ({"json": {"enum": ["x" * 10_000_000]}}, "at most 131072 are allowed"),
        ({"json": json.dumps({"enum": ["x" * 10_000_000]})}, "at most 131072 are allowed"),
        ({"json": nested(500)}, "100 levels"),
        ({"json": '{"items":' * 100_000 + "{}" + "}" * 100_000}, "levels|JSON|131072"),
        ({"json": in_object(**{f"property_{i}": {} for i in range(9000)})}, "at most 131072"),
        ({"json": {"allOf": [{"anyOf": [in_object(**{f"{i}_{j}": {}}) for j in range(4)]}
                             for i in range(10)]}}, "too large"),
        ({"regex": "(" * 10_000 + "a" + ")" * 10_000}, "invalid regex"),
        ({"regex": "a" * (MAX_CHARACTERS + 1)}, "at most 131072"),
        ({"choice": ["abc"] * 200_000}, "at most 131072"),
        ({"grammar": "start: " + "(" * 3000 + '"a"' + ")" * 3000}, "nested"),
        ({"grammar": "root ::= " + '"a" ' * 10_000}, "at most 32768"),
        ({"json": PATTERNS}, "more than 0.3 s to compile"),
        ({"json": {"type": "integer", "multipleOf": 999_983}}, "more than 0.3 s to compile"),
        ({"grammar": "start: " + '("a"|"b")* ' * 8000}, "more than 0.3 s to compile"),
        ({"json": {"allOf": [{"anyOf": [in_object(**{f"{i}_{j}": {}}) for j in range(4)]}
                             for i in range(6)]}}, "too large|more than 0.3 s"),
        ({"grammar": "root ::= " + "(" * 3000 + '"a"' + ")" * 3000}, ""),
    ],
)  # fmt: skip
def test_hostile_options_end_soon(option: Any, says: str) -> None:
    start = time.process_time()
    assert re.search(says, refusal(option).message)
    assert time.process_time() - start < 2


@pytest.mark.parametrize(
    "option",
    [
        {"regex": "(((a{1,100}){1,100}){1,100}){1,100}"},
        {"regex": "(.*a.{200}.*b.{200}){50}"},
        {"regex": "|".join(f"abc{i}" for i in range(14_000))},
        {"json": {"enum": [f"value {i}" for i in range(8_000)]}},
        {"choice": [f"value {i}" for i in range(4_000)]},
        {"grammar": "root ::= " + " | ".join(f'"{i}"' for i in range(3_000))},
        {"grammar": 'start: start start | "a" | '},
        {"json": {"type": "array", "minItems": 100_000, "items": {}}},
        {"json": in_object(**{f"property_{i}": {"type": "null"} for i in range(1000)})},
    ],
)
def test_large_options_take_little_time(option: Any) -> None:
    start = time.process_time()
    compiled(SamplingParams(structured_outputs=option).structured_outputs or {})
    assert time.process_time() - start < 2


def test_after_a_hostile_grammar_others_compile() -> None:
    for _ in range(2):
        assert "more than 0.3 s" in refusal({"json": PATTERNS}).message
        assert compiled({"regex": "a+"})


def test_after_ctrl_c_the_next_grammar_gets_its_own_answer() -> None:
    assert compiled({"regex": "a+"})
    process = trial._helpers(os.getpid())[0].process
    assert process
    process.send_signal(signal.SIGSTOP)
    main = threading.main_thread().ident
    assert main
    threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        compiled({"regex": "(("})
    process.send_signal(signal.SIGCONT)
    assert compiled({"regex": "a+"})


def test_the_end_of_the_helper_refuses_no_grammar() -> None:
    assert compiled({"regex": "a+"})
    process = trial._helpers(os.getpid())[0].process
    assert process
    process.kill()
    process.wait(timeout=60)
    assert compiled({"regex": "a+"})


def test_a_grammar_does_not_wait_for_one_of_another_thread() -> None:
    first = trial._helpers(os.getpid())[0]
    with first._lock:  # as while it compiles
        assert compiled({"regex": "a+"})
