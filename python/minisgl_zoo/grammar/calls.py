"""Grammars of tool calls: in each syntax the arguments follow the schema of the tool."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from minisgl_zoo.grammar.answer import TEXT, AnswerGrammar, escaped
from minisgl_zoo.grammar.compile import json_grammar
from minisgl_zoo.grammar.schema import target

_MOVED: Final = "arguments"
"""The name of the definition that a schema becomes within another one."""

MAX_REFERENCES: Final = 4
"""How many references after one another the schema of all arguments may be."""

Tool = tuple[str, dict[str, Any]]
"""(name, JSON schema of the arguments)."""


def object_call(
    grammar: AnswerGrammar, tools: Sequence[Tool], keys: tuple[str, str], begin: str, end: str
) -> str:
    """Return Lark for an object with the name and the arguments, between `begin` and `end`.

    keys: the key of the name, and that of the arguments.
    """
    calls, line = _objects(grammar, tools, keys), '("\\n")?' if begin else ""
    return f"{grammar.literal(begin)} {line} {calls} {line} {grammar.literal(end)}"


def list_of_calls(
    grammar: AnswerGrammar,
    tools: Sequence[Tool],
    keys: tuple[str, str],
    begin: str,
    end: str,
    *,
    is_one: bool,
) -> str:
    """Return Lark for a list of objects as in `object_call`, between `begin` and `end`.

    is_one: whether the list has one call; else it has one or more.
    """
    calls = _objects(grammar, tools, keys)
    others = "" if is_one else f"(/, ?/ {calls})*"
    return f'{grammar.literal(begin)} (" ")? "[" {calls} {others} "]" {grammar.literal(end)}'


def named_call(grammar: AnswerGrammar, tools: Sequence[Tool], header: str, footer: str) -> str:
    """Return Lark for `header`, in which the name replaces NAME, the arguments as JSON, and
    `footer`."""
    calls = [
        f"{grammar.literal(header.replace('NAME', name))} {grammar.sub(json_grammar(schema))}"
        for name, schema in tools
    ]
    return f"({' | '.join(calls)}) {grammar.literal(footer)}"


def tagged_call(
    grammar: AnswerGrammar, tools: Sequence[Tool], header: str, argument: str, footer: str
) -> str:
    """Return Lark for `header`, in which the name replaces NAME, the arguments, and `footer`.

    argument: the text of an argument, in which its name replaces KEY, and its value VALUE: a string
    as it is, other values as JSON.
    """
    calls = []
    for name, root in tools:
        call, schema = grammar.literal(header.replace("NAME", name)), root
        for _ in range(MAX_REFERENCES):
            if str(schema.get("$ref")).startswith("#/"):
                schema = target(root, schema["$ref"])
        required = schema.get("required", [])
        for key, part in schema.get("properties", {}).items():
            before, after = (text.replace("KEY", key) for text in argument.split("VALUE"))
            shown = f"{grammar.literal(before)} {_value(grammar, part, root, after)}"
            call += f" {shown}" if key in required else f" ({shown})?"
        calls.append(f"{call} {grammar.literal(footer)}")
    return " | ".join(f"({call})" for call in calls)


def _value(grammar: AnswerGrammar, schema: Any, root: dict[str, Any], after: str) -> str:
    """Return Lark for an argument's value and the text behind it. root: the schema of all
    arguments."""
    closing = grammar.literal(after)
    if not isinstance(schema, dict):
        return f"{grammar.sub(json_grammar(schema))} {closing}"
    choices = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if choices:
        shown = [value if isinstance(value, str) else json.dumps(value) for value in choices]
        return f"({' | '.join(map(grammar.literal, shown))}) {closing}"
    if schema.get("type") == "string":
        tag = after.strip()
        if grammar.token_id(tag) is not None:  # a line break before the tag is optional
            return f"{TEXT} {grammar.literal(after.lstrip())}"
        return f"/[^<]*{escaped(after)}/"
    if '"$ref"' in json.dumps(schema):
        schema = {**_moved(schema), "$defs": {_MOVED: _moved(root)}}
    return f"{grammar.sub(json_grammar(schema))} {closing}"


def _objects(grammar: AnswerGrammar, tools: Sequence[Tool], keys: tuple[str, str]) -> str:
    """Return Lark for an object of one of the tools. Each is a grammar of its own, because its
    schema is the place to which its references point."""
    calls = [grammar.sub(json_grammar(_object(name, schema, *keys))) for name, schema in tools]
    return f"({' | '.join(calls)})"


def _object(name: str, schema: dict[str, Any], name_key: str, key: str) -> dict[str, Any]:
    return {
        "$defs": {_MOVED: _moved(schema)},
        "type": "object",
        "properties": {name_key: {"const": name}, key: {"$ref": f"#/$defs/{_MOVED}"}},
        "required": [name_key, key],
        "additionalProperties": False,
    }


def _moved(schema: Any) -> Any:
    """Return a schema as a definition of another one: its references point to their new places."""
    if isinstance(schema, list):
        return [_moved(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: f"#/$defs/{_MOVED}{part[1:]}"
        if key == "$ref" and (part == "#" or str(part).startswith("#/"))
        else _moved(part)
        for key, part in schema.items()
    }
