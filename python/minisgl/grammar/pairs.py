"""The grammar of Gemma's tool calls: NAME{key:value,...}, with marks of its own as quotes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from minisgl.errors import InvalidSampling
from minisgl.grammar.answer import TEXT, AnswerGrammar
from minisgl.grammar.calls import Tool
from minisgl.grammar.compile import json_grammar, text_literal
from minisgl.grammar.schema import target

_COMMA: Final = ' "," '
_KEY: Final = r"[\w.$-]+"
_PLAIN: Final = ("integer", "number", "boolean", "null")
_BOUNDS: Final = ("type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_KINDS: Final = ("object", "array", "string", *_PLAIN)


def pairs_call(
    grammar: AnswerGrammar, tools: Sequence[Tool], begin: str, end: str, quote: str
) -> str:
    """Return Lark for a call of one of `tools`. The pattern and length of a text are not enforced.

    Raises InvalidSampling for a name that this syntax cannot write.
    """
    found = []
    for index, (name, schema) in enumerate(tools):
        values = _Values(grammar=grammar, quote=quote, root=schema, tool=name, tool_index=index)
        arguments = values.of({"type": "object", **schema})
        found.append(f"({grammar.literal(begin + name)} {arguments} {grammar.literal(end)})")
    return " | ".join(found)


@dataclass(slots=True, kw_only=True)
class _Values:
    """Writes Lark for values of a tool's arguments. Mutable: it keeps the rule of each reference.

    root: the schema of the arguments, to which references point.
    """

    grammar: AnswerGrammar
    quote: str
    root: Mapping[str, Any]
    tool: str
    tool_index: int
    rules: dict[str, str] = field(default_factory=dict)

    def of(self, schema: Any) -> str:
        """Return Lark for a value."""
        if not isinstance(schema, Mapping):
            return self._any()
        if "$ref" in schema:
            return self._named(schema["$ref"], target(self.root, schema["$ref"]))
        if "const" in schema or "enum" in schema:
            choices = schema["enum"] if "enum" in schema else [schema["const"]]
            return self._either([self._written(value) for value in choices])
        for key in ("anyOf", "oneOf", "allOf"):
            if parts := schema.get(key):
                return self._either([self.of(part) for part in parts])
        kinds = schema.get("type", _KINDS if set(schema) & {"items", "properties"} else None)
        if kinds is None:
            return self._any()
        kinds = [kinds] if isinstance(kinds, str) else kinds
        return self._either([self._kind(kind, schema) for kind in kinds])

    def _kind(self, kind: str, schema: Mapping[str, Any]) -> str:
        if kind == "string":
            return self._text()
        if kind in _PLAIN:
            bounds = {key: schema[key] for key in _BOUNDS if key in schema}
            return self.grammar.sub(json_grammar({**bounds, "type": kind}))
        if kind == "array":
            return self._list(schema)
        if not schema.get("properties"):
            pair = f'/[A-Za-z0-9_.$-]+/ ":" {self._any()}'
            is_empty = schema.get("additionalProperties") is False
            return '"{" "}"' if is_empty else f'"{{" ({pair} ("," {pair})*)? "}}"'
        return f'"{{" {self._pairs(schema)} "}}"'

    def _list(self, schema: Mapping[str, Any]) -> str:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        item = self.of(schema.get("items", True))
        if most == 0:
            return '"[" "]"'
        most_more = "" if most is None else most - 1
        more = f'("," {item}){{{max(least - 1, 0)},{most_more}}}' if most != 1 else ""
        items = f"{item} {more}"
        return f'"[" {items} "]"' if least else f'"[" ({items})? "]"'

    def _pairs(self, schema: Mapping[str, Any]) -> str:
        """Return Lark for pairs in the order of their keys, as the templates sort them.

        What may follow a pair is a rule: without a comma if no pair is written yet, else with one.
        """
        required, rest = set(schema.get("required", ())), ('""', '""')
        for key, part in sorted(schema["properties"].items(), reverse=True):
            if not re.fullmatch(_KEY, key):
                raise InvalidSampling(
                    f"tools.{self.tool}.parameters: this model cannot write the name {key!r}; "
                    "letters, digits and _ . $ - are possible",
                    param="tools",
                )
            pair = f"{text_literal(key + ':')} {self.of(part)} {rest[1]}"
            first, later = f"({pair})", f'("," {pair})'
            if key not in required:
                first, later = f"{first} | {rest[0]}", f"{later} | {rest[1]}"
            rest = (self._rule(first), self._rule(later))
        return rest[0]

    def _written(self, value: Any) -> str:
        """Return Lark for this value."""
        if isinstance(value, str):
            return self.grammar.literal(f"{self.quote}{value}{self.quote}")
        if isinstance(value, Mapping):
            pairs = [
                f"{text_literal(f'{key}:')} {self._written(part)}" for key, part in value.items()
            ]
            return f'"{{" {_COMMA.join(pairs)} "}}"'
        if isinstance(value, list):
            return f'"[" {_COMMA.join(map(self._written, value))} "]"'
        return text_literal(json.dumps(value))

    def _text(self) -> str:
        quote = self.grammar.literal(self.quote)
        body = "/[^<]*/" if self.grammar.token_id(self.quote) is None else TEXT
        return f"{quote} {body} {quote}"

    def _any(self) -> str:
        return self._named("", {"type": list(_KINDS)})

    def _named(self, name: str, schema: Any) -> str:
        """Return the rule of a schema, which may refer to itself."""
        if name not in self.rules:
            self.rules[name] = f"named_{self.tool_index}_{len(self.rules)}"
            self.grammar.rule(self.rules[name], self.of(schema))
        return self.rules[name]

    def _rule(self, body: str) -> str:
        return self.grammar.rule(f"rest{len(self.grammar.rules)}", body)

    @staticmethod
    def _either(choices: Sequence[str]) -> str:
        return choices[0] if len(choices) == 1 else f"({' | '.join(choices)})"
