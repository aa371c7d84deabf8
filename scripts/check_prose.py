"""Checks names in the prose of a document: commands in backticks, scripts, and links to files.

`check_docs.py` and its test call it.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]

_BLOCKS: Final = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_COMMAND: Final = re.compile(
    r"`((?:minisgl|python -m minisgl_bench.studies|make|pip) [a-z\"-][^`]*)`"
)
_SCRIPT: Final = re.compile(r"\b(scripts/\w+\.(?:py|sh))\b")
_LINK: Final = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
_FENCE: Final = re.compile(r"^(?! *```\w*(?: \w+)?$).*```.*", re.MULTILINE)
"""A line with the fence of a block and more: the block has been joined with the text around it."""
_HEADING: Final = re.compile(r"^#+ (.*)$", re.MULTILINE)
_STANDS_FOR: Final = re.compile(r"\b[A-Z]{1,9}\b|[\[\]<>…]|\.\.\.")
"""A word in capitals, or another mark that a reader replaces."""
NOT_PARSED: Final = ("minisgl help", "minisgl completion", "minisgl version")


RECORDS: Final = (ROOT / "CHANGELOG.md", *sorted((ROOT / "benchmarks/log").glob("*.md")))
"""Their commands may be those of an earlier commit."""


def documents() -> list[Path]:
    pages = [ROOT / "README.md", ROOT / "training/README.md", *RECORDS]
    return [*pages, *sorted((ROOT / "docs").rglob("*.md"))]


def commands(path: Path) -> list[str]:
    """Return the commands in the text of a page, outside its blocks."""
    text = _BLOCKS.sub("", path.read_text(encoding="utf-8"))
    found = (" ".join(match[1].split()) for match in _COMMAND.finditer(text))
    return [line for line in found if not line.startswith(NOT_PARSED)]


def command_fault(line: str, parse: Callable[[str], None]) -> str:
    """Return the error of `parse` for a command, or "". If a reader has to fill something in, only
    the command's name is checked."""
    words = line.split()
    if _STANDS_FOR.search(line):
        num = 4 if words[0] == "python" else 3 if words[1] == "bench" else 2
        words = [word for word in words[:num] if not _STANDS_FOR.search(word)] + ["--help"]
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            parse(" ".join(words))
    except SystemExit as end:
        is_known = not end.code or "arguments are required" in said.getvalue()
        return "" if is_known else said.getvalue().strip()
    except (ValueError, ImportError) as error:
        return str(error)
    return ""


def faults(path: Path, parse: Callable[[str], None]) -> Iterator[str]:
    """Yield a line for each command, script or link of a page that does not exist, and for each
    fence that does not stand alone."""
    name, text = path.relative_to(ROOT), path.read_text(encoding="utf-8")
    for line in _FENCE.findall(text):
        yield f"{name}: a fence stands alone: {line.strip()}"
    for line in [] if path in RECORDS else commands(path):
        if said := command_fault(line, parse):
            yield f"{name}: {line}: {said}"
    for script in [] if path in RECORDS else sorted(set(_SCRIPT.findall(text))):
        if not (ROOT / script).exists():
            yield f"{name}: there is no {script}"
    for link, heading in _LINK.findall(text):
        target = path.parent / link if link else path
        if "://" in link:
            continue
        if not target.exists():
            yield f"{name}: there is no {link}"
        elif heading and target.suffix == ".md" and heading not in _anchors(target):
            yield f"{name}: {link or 'this page'} has no heading for #{heading}"


def _anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    plain = (re.sub(r"[^\w\- ]", "", line.lower()) for line in _HEADING.findall(page.read_text()))
    return {line.strip().replace(" ", "-") for line in plain}
