"""The process that compiles and fills chat templates. It trusts the process that asks it.

::

    python -m minisgl.templates.render BYTES      the memory that it may take

    ["load", key, {name: source}]                       -> ["text", ""]
    ["fill", key, name, variables, most characters]     -> ["text", the prompt]
                                                        -> ["unknown", ""]: load `key` first
    both                                                -> ["problem", why]
"""

from __future__ import annotations

import sys
from typing import Any, Final

import jinja2

from minisgl.templates.sandbox import environment
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
        environ = environment()
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


if __name__ == "__main__":
    limit_memory(int(sys.argv[1]))
    serve(Renderer(int(sys.argv[1])).answer)
