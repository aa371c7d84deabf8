"""Tests share code through tests/helpers. They do not import each other."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parent
TEST_IMPORT = re.compile(r"^\s*(?:from|import)\b.*\btest_", re.MULTILINE)


def imported(path: Path) -> set[str]:
    """Return the modules that a file imports, by the last part of their names, if one of them may
    be a test: to parse all files takes seconds."""
    names: set[str] = set()
    text = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)) if TEST_IMPORT.search(text) else ():
        if isinstance(node, ast.ImportFrom):
            names.add((node.module or "").rpartition(".")[2])
        elif isinstance(node, ast.Import):
            names.update(alias.name.rpartition(".")[2] for alias in node.names)
    return names


def test_no_test_imports_another() -> None:
    modules = {path.stem for path in TESTS.rglob("test_*.py")}
    found = {
        str(path.relative_to(TESTS)): sorted(others)
        for path in sorted(TESTS.rglob("*.py"))
        if (others := imported(path) & modules)
    }
    assert not found, f"move what they share to tests/helpers: {found}"


def test_each_file_has_a_name_of_its_own() -> None:
    """pytest does not collect a second file of one name, unless the first one was skipped."""
    names = Counter(path.name for path in TESTS.rglob("test_*.py"))
    assert max(names.values()) == 1, names.most_common(5)
