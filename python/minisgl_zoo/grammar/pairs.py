"""The grammar of Gemma's tool calls: NAME{key:value,...}, with marks of its own as quotes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Final

from minisgl.errors import InvalidSampling
from minisgl_zoo.grammar.answer import TEXT, AnswerGrammar
from minisgl_zoo.grammar.calls import MAX_REFERENCES, Tool
from minisgl_zoo.grammar.compile import json_grammar, text_literal
from minisgl_zoo.grammar.schema import target

_COMMA: Final = ' "," '
_KEY: Final = r"[\w.$-]+"
_PLAIN: Final = ("integer", "number", "boolean", "null")
_BOUNDS: Final = ("type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_TOGETHER: Final = {"type", "properties", "required", "allOf", "anyOf", "oneOf", "$ref"}
"""Keywords that describe a value together with others."""
MAX_SCHEMAS: Final = 20_000
"""A schema of 128 KiB has as many; branches beside other keywords multiply them."""
_KINDS: Final = ("object", "array", "string", *_PLAIN)


def pairs_call(
    grammar: AnswerGrammar, tools: Sequence[Tool], begin: str, end: str, quote: str
) -> str:
    """Return Lark for a call of one of `tools`. The pattern and length of a text are not enforced.

    Raises InvalidSampling for a name that this syntax cannot write, and for a schema whose
    references go in a circle or make it too large.
    """
    found = []
    for index, (name, schema) in enumerate(tools):
        values = _Values(grammar=grammar, quote=quote, root=schema, tool=name, tool_index=index)
        try:
            arguments = values.of({"type": "object", **schema})
        except RecursionError:
            raise InvalidSampling(
                f"tools.{name}.parameters cannot be used: its references go in a circle",
                param="tools",
            ) from None
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
    num_schemas: int = 0

    def of(self, schema: Any) -> str:
        """Return Lark for a value. Raises InvalidSampling for more than `MAX_SCHEMAS` of them."""
        self.num_schemas += 1
        if self.num_schemas > MAX_SCHEMAS:
            raise InvalidSampling(
                f"tools.{self.tool}.parameters cannot be used: references or branches make it too "
                "large; use a simpler schema",
                param="tools",
            )
        if not isinstance(schema, Mapping):
            return self._any()
        if _TOGETHER & schema.keys() == {"$ref"}:
            return self._named(schema["$ref"], target(self.root, schema["$ref"]))
        if "$ref" in schema or "allOf" in schema:
            parts = [*schema.get("allOf", ())]
            parts += [{"$ref": schema["$ref"]}] if "$ref" in schema else []
            alone: Mapping[str, Any] = {
                key: value for key, value in schema.items() if key not in ("$ref", "allOf")
            }
            return self.of(reduce(self._merged, parts, alone))
        if "const" in schema or "enum" in schema:
            choices = [schema["const"]] if "const" in schema else schema["enum"]
            return self._either([self._written(value) for value in choices])
        for key in ("anyOf", "oneOf"):
            if branches := schema.get(key):
                beside = {name: value for name, value in schema.items() if name != key}
                merges = bool(_TOGETHER & beside.keys())
                return self._either(
                    [self.of(self._merged(beside, part) if merges else part) for part in branches]
                )
        kinds = schema.get("type", _KINDS if set(schema) & {"items", "properties"} else None)
        if kinds is None:
            return self._any()
        kinds = [kinds] if isinstance(kinds, str) else kinds
        return self._either([self._kind(kind, schema) for kind in kinds])

    def _merged(self, one: Mapping[str, Any], other: Any) -> Mapping[str, Any]:
        """Return a schema of what is valid by both. If both bound a number or a list in the same
        way, the bound of `other` counts."""
        for _ in range(MAX_REFERENCES):
            if isinstance(other, Mapping) and other.keys() == {"$ref"}:
                other = target(self.root, other["$ref"])
        if not isinstance(other, Mapping):
            return one
        merged = {**one, **other}
        properties = dict(one.get("properties", {}))
        for name, part in other.get("properties", {}).items():
            both = [each for each in (properties.get(name, True), part) if each is not True]
            properties[name] = {"allOf": both} if len(both) > 1 else next(iter(both), True)
        if "properties" in merged:
            merged["properties"] = properties
        if "required" in merged:
            merged["required"] = [*one.get("required", ()), *other.get("required", ())]
        if "enum" in one and "enum" in other:
            merged["enum"] = [value for value in other["enum"] if value in one["enum"]]
        if "allOf" in one and "allOf" in other:
            merged["allOf"] = [*one["allOf"], *other["allOf"]]
        return merged

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
