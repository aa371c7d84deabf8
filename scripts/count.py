"""Counts files, lines of code and tokens of the packages under python/.

    python scripts/count.py

A line of code holds a token of Python: blank lines, comments and docstrings do not count.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PACKAGES: Final = Path(__file__).resolve().parents[1] / "python"

NO_CODE: Final = {
    tokenize.COMMENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
    tokenize.INDENT,
    tokenize.NEWLINE,
    tokenize.NL,
}
"""These tokens are layout or comments, so a line with nothing else holds no code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """What a package, or all of them, has."""

    files: int = 0
    lines: int = 0
    tokens: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(
            files=self.files + other.files,
            lines=self.lines + other.lines,
            tokens=self.tokens + other.tokens,
        )


def count_text(text: str) -> Count:
    """Count one file's text."""
    lines: set[int] = set()
    num_tokens = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            num_tokens += 1
            lines.update(range(token.start[0], token.end[0] + 1))
    for first, last in _docstrings(ast.parse(text)):
        lines.difference_update(range(first, last + 1))
    return Count(files=1, lines=len(lines), tokens=num_tokens)


def _docstrings(tree: ast.Module) -> Iterator[tuple[int, int]]:
    """Yield the first and the last line of each string that stands as a statement."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                yield node.lineno, node.end_lineno or node.lineno


def count_package(name: str) -> Count:
    """Count all Python files below python/NAME."""
    files = (PACKAGES / name).rglob("*.py")
    return sum((count_text(path.read_text(encoding="utf-8")) for path in files), Count())


def count_all() -> dict[str, Count]:
    """Return the count of each package."""
    names = sorted(path.parent.name for path in PACKAGES.glob("minisgl*/__init__.py"))
    return {name: count_package(name) for name in names}


def main() -> None:
    counts = count_all()
    print(f"{'':18}{'files':>8}{'lines':>10}{'tokens':>10}")
    for name, count in [*counts.items(), ("together", sum(counts.values(), Count()))]:
        print(f"{name:18}{count.files:8,}{count.lines:10,}{count.tokens:10,}")


if __name__ == "__main__":
    main()
