"""The process that compiles and fills chat templates. It trusts the process that asks it.

::

    python -m minisgl.templates.render BYTES      the memory that it may take

    ["load", key, {name: source}]                       -> ["text", ""]
    ["fill", key, name, variables, most characters]     -> ["text", the prompt]
                                                        -> ["unknown", ""]: load `key` first
    both                                                -> ["problem", why]
"""

from __future__ import annotations

import json
import sys
from datetime import datetime
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from minisgl.utils.helper import limit_memory, serve

MAX_LOADED: Final = 4
"""Checkpoints whose templates stay compiled. A server has one, a Python program a few."""


class Renderer:
    """Answers the questions. Mutable: it keeps compiled templates."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._loaded: dict[str, dict[str, jinja2.Template]] = {}

    def answer(self, question: Any) -> tuple[str, str]:
        try:
            match question:
                case ["load", key, sources]:
                    return self._load(key, sources)
                case ["fill", key, name, variables, most]:
                    if key not in self._loaded:
                        return "unknown", ""
                    return "text", _filled(self._loaded[key][name], variables, most)
        except MemoryError:
            return "problem", f"it takes more than {self._max_bytes:,} bytes"
        except jinja2.TemplateSyntaxError as error:
            return "problem", f"line {error.lineno}: {error}"
        except jinja2.TemplateError as error:
            return "problem", str(error)
        except Exception as error:  # a template is a program: anything may break in it
            return "problem", f"{type(error).__name__}: {error}"
        raise AssertionError(f"no question: {question[:2]}")

    def _load(self, key: str, sources: dict[str, str]) -> tuple[str, str]:
        if len(self._loaded) >= MAX_LOADED:
            self._loaded.clear()
        environ = _environment()
        self._loaded[key] = {name: environ.from_string(text) for name, text in sources.items()}
        return "text", ""


def _filled(template: jinja2.Template, variables: dict[str, Any], most: int) -> str:
    pieces: list[str] = []
    size = 0
    for piece in template.generate(variables):
        pieces.append(piece)
        size += len(piece)
        if size > most:
            raise jinja2.TemplateError(f"its text exceeds {most:,} characters")
    return "".join(pieces)


def _environment() -> jinja2.Environment:
    """Return that of "Chat templates" in transformers' documentation, for which model makers write
    them, in jinja's immutable sandbox. It bounds neither time nor memory."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    made.filters["tojson"] = _tojson
    made.globals["raise_exception"] = _raise_exception
    made.globals["strftime_now"] = _strftime_now
    return made


class _Generation(Extension):
    """``{% generation %}`` marks the assistant's part for training. Here its body is rendered."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return the JSON of a value. Jinja's own filter would escape it for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


if __name__ == "__main__":
    limit_memory(int(sys.argv[1]))
    serve(Renderer(int(sys.argv[1])).answer)
