"""Turns calls in Python's syntax, f(a=1, b='x'), into JSON."""

from __future__ import annotations

import ast
import contextlib
import json
import re
import warnings
from collections.abc import Iterable
from typing import Any, Final

LONE: Final = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair, which a model may write as an escape."""
_WORDS: Final = {"true": True, "false": False, "null": None}
ERRORS: Final = (ValueError, SyntaxError, TypeError, KeyError, RecursionError, MemoryError)
"""What `ast` and `json` raise for a text that a model wrote wrong."""


def python_calls(body: str, names: Iterable[str]) -> list[tuple[str, str]]:
    """Return (name, JSON of the arguments) of each call; nothing if one of them cannot be read.

    body: a list of calls, a call on each line, or a list of JSON objects with `name` and
    `arguments`. names: of the tools, which need not be valid in Python. JSON's true, false and null
    are allowed, and so are line breaks in a text, as some templates write them.
    """
    with contextlib.suppress(*ERRORS):
        return [_of_object(each) for each in json.loads(body)]
    own = {f"tool_{index}_": name for index, name in enumerate(names) if not name.isidentifier()}
    for short, name in own.items():
        body = re.sub(rf"(^|[\[,\n]\s*){re.escape(name)}\(", rf"\1{short}(", body)
    for text in (body, body.replace("\n", "\\n")):
        with contextlib.suppress(*ERRORS), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about backslashes in a text
            calls = [_call(node) for node in _nodes(ast.parse(text))]
            return [(own.get(name, name), dumped(values)) for name, values in calls]
    return []


def dumped(value: Any) -> str:
    """Return the JSON of a value. Raises ValueError for NaN and infinities, which JSON lacks."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    # UTF-8 cannot encode one half of a surrogate pair; its JSON escape can be sent.
    return json.dumps(value) if LONE.search(text) else text


def _of_object(call: Any) -> tuple[str, str]:
    if not isinstance(name := call["name"], str):
        raise ValueError("a name is a text")
    return LONE.sub("\ufffd", name), dumped(call["arguments"])


def _nodes(tree: ast.Module) -> list[ast.expr]:
    nodes = [line.value for line in tree.body if isinstance(line, ast.Expr)]
    if len(nodes) == 1 and isinstance(nodes[0], ast.List | ast.Tuple):
        return nodes[0].elts
    return nodes


def _call(node: ast.expr) -> tuple[str, dict[str, Any]]:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("not a call with named arguments")
    values = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("** has no name")
        values[keyword.arg] = ast.literal_eval(_Words().visit(keyword.value))
    return ast.unparse(node.func), values


class _Words(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_WORDS[node.id])
