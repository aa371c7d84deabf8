"""The spine, which is what answers one greedy prompt on the reference path, stays small."""

from __future__ import annotations

import ast
import io
import os
import subprocess
import sys
import tokenize
from collections import Counter
from pathlib import Path

MAX_LINES = 6_500
"""Decision 0007. What plugs in (fast kernels, other families, formats, ranks, servers) is imported
when it is used, and adds nothing here."""

ANSWER = """
import sys
from minisgl.llm import LLM, SamplingParams
if __name__ == "__main__":
    with LLM(attn="torch", device="cpu", num_pages=64, progress=False) as llm:
        llm.generate("Hello", SamplingParams(max_tokens=4, temperature=0.0))
    for name, module in sorted(sys.modules.items()):
        if name.split(".")[0] == "minisgl":
            print(module.__file__)
"""

LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def code_lines(source: str) -> int:
    """Lines that hold code: no blank lines, no comments, no strings that are statements."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def test_code_lines_counts_code_alone() -> None:
    source = (
        '"""Doc\n\nstring."""\n\n# comment\nx = (\n    1,  # one\n\n    2,\n)\n\n\ny = """a\nb"""\n'
    )
    assert code_lines(source) == 6


def test_the_spine_is_at_most_so_long() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ANSWER],
        env={**os.environ, "MINISGL_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    files = [Path(line) for line in done.stdout.splitlines() if line.endswith(".py")]
    assert len(files) > 40, "the count has lost its subject"
    package = next(
        path.parent
        for path in files
        if path.name == "__init__.py" and path.parent.name == "minisgl"
    )
    rooms: Counter[str] = Counter()
    for path in files:
        rooms[path.relative_to(package).parts[0]] += code_lines(path.read_text(encoding="utf-8"))
    by_room = ", ".join(f"{room} {count}" for room, count in rooms.most_common())
    assert rooms.total() <= MAX_LINES, f"{rooms.total()} lines: {by_room}"
