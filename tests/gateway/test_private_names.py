"""What observes the core reads its public names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import minisgl_gateway

ROOT = Path(minisgl_gateway.__file__).parent
OF_NAMED_TUPLES = {"_make", "_replace"}


def test_the_gateway_reads_no_private_attribute_of_the_core() -> None:
    """A name that the gateway itself defines is not looked at: its own objects have it, too."""
    trees = {path: ast.parse(path.read_text()) for path in ROOT.rglob("*.py")}
    own, foreign = set(OF_NAMED_TUPLES), set()
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                own.add(node.name)
            if isinstance(node, ast.Attribute) and re.match("_[^_]", node.attr):
                if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                    own.add(node.attr)
                elif not ast.unparse(node).startswith("torch."):
                    foreign.add((node.attr, ast.unparse(node), path.name))
    assert {one for one in foreign if one[0] not in own} == set()
