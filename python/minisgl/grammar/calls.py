"""Grammars of tool calls: in each syntax the arguments follow the schema of the tool."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from minisgl.grammar.answer import TEXT, AnswerGrammar, escaped
from minisgl.grammar.compile import definitions_of, json_grammar

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
    for name, schema in tools:
        call = grammar.literal(header.replace("NAME", name))
        required = schema.get("required", [])
        definitions = definitions_of(schema)
        for key, part in schema.get("properties", {}).items():
            before, after = (text.replace("KEY", key) for text in argument.split("VALUE"))
            shown = f"{grammar.literal(before)} {_value(grammar, part, definitions, after)}"
            call += f" {shown}" if key in required else f" ({shown})?"
        calls.append(f"{call} {grammar.literal(footer)}")
    return " | ".join(f"({call})" for call in calls)


def _value(grammar: AnswerGrammar, schema: Any, definitions: dict[str, Any], after: str) -> str:
    """Return Lark for an argument's value and the text behind it."""
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
    return f"{grammar.sub(json_grammar({**definitions, **schema}))} {closing}"


def _objects(grammar: AnswerGrammar, tools: Sequence[Tool], keys: tuple[str, str]) -> str:
    """Return Lark for an object of one of the tools. Each schema has its own definitions, so each
    is a grammar of its own."""
    calls = [grammar.sub(json_grammar(_object(name, schema, *keys))) for name, schema in tools]
    return f"({' | '.join(calls)})"


def _object(name: str, schema: dict[str, Any], name_key: str, key: str) -> dict[str, Any]:
    return {
        **definitions_of(schema),
        "type": "object",
        "properties": {name_key: {"const": name}, key: schema},
        "required": [name_key, key],
        "additionalProperties": False,
    }
