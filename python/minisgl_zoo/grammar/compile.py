"""Turns the option `structured_outputs` into a grammar that every rank can match, or refuses it.

A grammar is text: JSON with a list of llguidance's grammars, of which the first is the start. The
check needs no vocabulary, so it needs no preparation. It is bounded: `minisgl_zoo.grammar.forms`
limits the size, `minisgl_zoo.grammar.trial` the time of compiling and the work of each mask.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any, Final

import llguidance
from llguidance.gbnf_to_lark import any_to_lark, is_lark_syntax

from minisgl.errors import InvalidSampling
from minisgl.utils.text import shortened
from minisgl_zoo.grammar import trial
from minisgl_zoo.grammar.closed import closed
from minisgl_zoo.grammar.schema import prepared

JSON_LAYOUT: Final = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""JSON on one line, with or without spaces behind commas and colons. JSON may have other
whitespace, but a weak model would fill its answer with it."""
MAX_GBNF: Final = 32 * 1024  # its conversion to Lark is Python: 1 s for 50 KB on a busy core
_DEFINITIONS: Final = ("$defs", "definitions")
_UNKNOWN_KEYS: Final = re.compile(r"Unimplemented keys: (\[.*\])")  # in llguidance's words
SEARCH_S: Final = 0.5  # to find the part of a schema that a refusal names


def answer_grammar(structured_outputs: dict[str, Any]) -> dict[str, Any]:
    """Return llguidance's grammar of a checked `structured_outputs`. Raises InvalidSampling."""
    [(kind, value)] = structured_outputs.items()
    match kind:
        case "json":
            return json_grammar(closed(json.loads(value), "structured_outputs.json"))
        case "json_object":
            return json_grammar({"type": "object"})
        case "regex":
            return {"lark_grammar": f"start: /{llguidance.regex_to_lark(value)}/"}
        case "choice":
            return {"lark_grammar": "start: " + " | ".join(map(text_literal, value))}
    if len(value) > MAX_GBNF and not is_lark_syntax(value):
        reason = (
            f"GBNF may have at most {MAX_GBNF} characters, got {len(value)}; Lark may have more"
        )
        raise _refusal("structured_outputs.grammar", reason)
    try:
        return {"lark_grammar": any_to_lark(value)}
    except Exception as error:  # the converter of GBNF may raise anything
        raise _refusal("structured_outputs.grammar", _summary(str(error))) from None


def json_grammar(schema: Any) -> dict[str, Any]:
    """Return the grammar of a JSON schema, an object or a boolean."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    return {"json_schema": {**prepared(schema), "x-guidance": JSON_LAYOUT}}


def text_literal(text: str) -> str:
    """Return `text` as a literal of llguidance's Lark."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def compiled(structured_outputs: dict[str, Any]) -> str:
    """Return the grammar's text. Raises InvalidSampling, which names the part that is wrong."""
    [kind] = structured_outputs
    if kind == "json":
        check_schemas({"structured_outputs.json": json.loads(structured_outputs[kind])})
    grammar = joined(answer_grammar(structured_outputs))
    if reason := problem(grammar):
        raise _refusal(f"structured_outputs.{kind}", reason)
    return grammar


def check_schemas(schemas: dict[str, Any]) -> None:
    """Check schemas by their paths, in `trial.LIMIT_S` for all of them. Raises InvalidSampling,
    which names the wrong part by its path below its schema's."""
    grammars = [joined(json_grammar(schema)) for schema in schemas.values()]
    index, why = trial.first_problem(grammars)
    if why:
        param, schema = list(schemas.items())[index]
        if why != trial.TOO_LONG:
            param, why = _locate(param, schema, _summary(why))
        elif len(schemas) > 1:  # all of them together can cause it
            param = param.partition(".")[0]
        raise _refusal(param, why)


def joined(*grammars: dict[str, Any]) -> str:
    """Return the text of grammars; the first is the start and names the others as @NAME."""
    return json.dumps({"grammars": grammars}, ensure_ascii=False, separators=(",", ":"))


def problem(grammar: str) -> str:
    """Return why a grammar cannot be compiled, "" if it can."""
    return _summary(trial.problem(grammar))


def _refusal(path: str, reason: str) -> InvalidSampling:
    path = shortened(path, 300)  # it has names of properties
    return InvalidSampling(f"{path} cannot be used: {shortened(reason, 300)}", param=path)


def _summary(message: str) -> str:
    """Return the first line of llguidance's message and the errors of a regex, without the lines
    that quote it."""
    first, *others = message.splitlines() or [""]
    if first.startswith("panic:"):  # the indices of llguidance's tables have 16 bits
        return "it is too large; use a simpler schema, regex or grammar"
    if first == "NoExtensionBias":  # llguidance's name of a state without a next token
        return "no text matches it; does a rule or $ref need itself without end?"
    if found := _UNKNOWN_KEYS.match(first):
        keys = ", ".join(json.loads(found[1]))
        return f"a schema cannot have {keys} here; leave that out, and check the answer yourself"
    if first.startswith("oneOf constraints are not supported"):
        return (
            "the schemas of oneOf must exclude one another: by their types, or by a required "
            "property whose const or enum differs; or use anyOf"
        )
    errors = [line.removeprefix("error: ") for line in others if line.startswith("error: ")]
    return " ".join([shortened(first, 150), *errors])


def _locate(path: str, schema: Any, reason: str) -> tuple[str, str]:
    """Return the path of the smallest part of `schema` that is refused with the same reason."""
    definitions = {}  # to which references in a part of the schema point
    if isinstance(schema, dict):
        definitions = {key: schema[key] for key in _DEFINITIONS if key in schema}
    deadline = time.monotonic() + SEARCH_S
    part = schema
    while reason != trial.TOO_LONG:  # which all parts together can cause
        for name, inner in _parts(part):
            if time.monotonic() > deadline:
                return path, reason
            alone = {**definitions, **inner}
            if problem(joined(json_grammar(alone))) == reason:
                path, part = f"{path}.{name}", inner
                break
        else:
            return path, reason
    return path, reason


def _parts(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the sub-schemas one level below that are objects, each with its name."""
    if not isinstance(schema, dict):
        return
    named = ("properties", "patternProperties", *_DEFINITIONS)
    for key in sorted(schema, key=lambda key: key not in _DEFINITIONS):  # before references to them
        value = schema[key]
        if isinstance(value, list):
            value = dict(enumerate(value))
        elif key not in named:
            value = {"": value}
        if key in ("enum", "const", "default", "examples") or not isinstance(value, dict):
            continue
        for name, inner in value.items():
            if isinstance(inner, dict):
                yield f"{key}.{name}" if name != "" else key, inner
