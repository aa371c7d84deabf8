"""A benchmark's flags; values are refused where they are read instead of where they divide."""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path
from typing import Any, Final

from minisgl.server.args import integer

__all__ = [
    "above_zero",
    "add_json",
    "benchmark_parser",
    "from_zero",
    "integer",
    "json_object",
    "natural",
    "naturals",
    "server_root",
]

natural: Final = integer(1)


def benchmark_parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """doc: of the benchmark's module; its first line says what it measures."""
    return argparse.ArgumentParser(
        prog=f"python -m minisgl.benchmark {name}",
        description=(doc or "").partition("\n")[0],
        formatter_class=_Help,
    )


class _Help(argparse.HelpFormatter):
    """Says each default, as one would type it, where the help does not."""

    def _get_help_string(self, action: argparse.Action) -> str:
        default, text = action.default, action.help or ""
        is_said = (
            isinstance(default, bool) or default in ("", argparse.SUPPRESS) or "default" in text
        )
        if is_said or not isinstance(default, str | int | float | list | tuple | Path):
            return text
        if isinstance(default, list | tuple):
            between = ":" if isinstance(default, tuple) else " " if action.nargs else ","
            default = between.join(map(str, default))
        said = f"{default:g}" if isinstance(default, float) else default
        return f"{text} (default: {said})"


def add_json(parser: argparse.ArgumentParser) -> None:
    """`--json FILE`, for `report.write_json`."""
    parser.add_argument(
        "--json", type=_result_file, metavar="FILE", help="write the results there as well"
    )


def _result_file(text: str) -> Path:
    """A file that can be written, as far as one can tell: what took minutes must not be lost."""
    path = Path(text)
    if not text or path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is no file to write to")
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written")
    return path


def naturals(text: str) -> list[int]:
    """With commas between."""
    return [natural(value) for value in text.split(",")]


def above_zero(text: str) -> float:
    if not 0 < (value := _float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return value


def from_zero(text: str) -> float:
    if not 0 <= (value := _float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, got {text!r}")
    return value


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def server_root(text: str) -> str:
    """OpenAI's clients are told of a server with /v1, which our paths have."""
    return text.rstrip("/").removesuffix("/v1")


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'must be a JSON object like {{"top_k": 5}}, got {text!r}')
    return value
