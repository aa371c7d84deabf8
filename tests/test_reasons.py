"""Every suppressed check and every skipped test has its reason beside it."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("python", "tests", "training", "scripts")
CODES = r"(?::\s*[A-Z]+\d+(?:,\s*[A-Z]+\d+)*|\[[^]]*\])?"
SUPPRESSED = re.compile(r"#\s*(?:noqa|type:\s*ignore)\b" + CODES)
SKIPPED = re.compile(r"\bpytest\.(importorskip\(|mark\.(skip|skipif|xfail)\b)")
MANY_WORDS = re.compile(r"\w+\W+\w+")


def tokens_of(text: str) -> Iterator[tokenize.TokenInfo]:
    return tokenize.generate_tokens(io.StringIO(text).readline)


def unexplained(path: Path) -> Iterator[str]:
    """Yield each line of a file that suppresses a check, or skips a test, without a reason."""
    text = path.read_text(encoding="utf-8")
    # Tokens tell a comment from a string with the same text. To find them takes a second for 300
    # files, and most files have neither.
    for token in tokens_of(text) if SUPPRESSED.search(text) else ():
        if token.type == tokenize.COMMENT and SUPPRESSED.search(token.string):
            reason = SUPPRESSED.sub("", token.string)
            if not MANY_WORDS.search(reason):
                yield f"{path.name}:{token.start[0]}: {token.string}"
    for number, line in enumerate(text.splitlines(), 1):
        code = line.split("#")[0]
        if SKIPPED.search(code) and "reason=" not in code:
            yield f"{path.name}:{number}: {code.strip()}"


def test_every_suppressed_check_and_skipped_test_has_a_reason() -> None:
    found = [
        line
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line in unexplained(path)
    ]
    assert not found, "\n".join(found)
