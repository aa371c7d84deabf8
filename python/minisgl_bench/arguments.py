"""Parsers for the flags of benchmarks. Each refuses a bad value while the flags are read."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from minisgl.server.flags import Parser, integer

natural: Final = integer(1)
T = TypeVar("T")


def benchmark_parser(module: str, doc: str | None) -> argparse.ArgumentParser:
    """Return the parser of a benchmark, for its module's `__name__` and `__doc__`.

    The first line of the docstring is the description.
    """
    package, _, name = module.rpartition(".")
    return Parser(
        prog=f"{command_of(package)} {name}",
        description=(doc or "").partition("\n")[0],
        formatter_class=_Help,
    )


def command_of(package: str) -> str:
    """Return the command that runs the benchmarks of `package`."""
    return "minisgl bench" if package == "minisgl_bench" else f"python -m {package}"


class _Help(argparse.HelpFormatter):
    """Adds the default to each help text that lacks it, as a user would type it."""

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


def add_word(parser: argparse.ArgumentParser, flag: str) -> None:
    """Let a word without a flag stand for `flag`. `take_word` must be called after the parsing."""
    name = flag.removeprefix("--")
    parser.add_argument("word", nargs="?", metavar=name.upper(), help=f"the same as {flag}")


def take_word(parser: argparse.ArgumentParser, args: argparse.Namespace, flag: str) -> None:
    """Set the flag to the word of `add_word`. Exits with code 2 if the word is wrong, or if both
    were given."""
    word: str | None = args.__dict__.pop("word")
    if word is None:
        return
    name = flag.removeprefix("--")
    action = next(one for one in parser._actions if flag in one.option_strings)
    if getattr(args, name) != action.default:
        parser.error(f"{name.upper()} is given twice: {word} and {flag} {getattr(args, name)}")
    if action.choices is not None and word not in action.choices:
        parser.error(f"{name.upper()} must be one of {', '.join(action.choices)}, got {word!r}")
    setattr(args, name, word)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add `--json FILE`, for `report.write_json`."""
    parser.add_argument(
        "--json", type=_result_file, metavar="FILE", help="also write the results to this file"
    )


def _result_file(text: str) -> Path:
    """Return the path. Refuses one that cannot be written, before the benchmark runs."""
    path = Path(text)
    if not text or path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not a file that can be written")
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written")
    return path


def naturals(text: str) -> list[int]:
    """Parse positive integers with commas between them."""
    return [natural(value) for value in text.split(",")]


def names_of(what: str, known: Mapping[str, T]) -> Callable[[str], dict[str, T]]:
    """Return a parser of names with commas between them, which returns what `known` has for each.

    what: what an error message calls one of them, such as "shape".
    """

    def parse(text: str) -> dict[str, T]:
        names = text.split(",")
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(
                f"there is no {what} {unknown[0]!r}; there are: {', '.join(known)}"
            )
        return {name: known[name] for name in names}

    return parse


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


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'must be a JSON object like {{"top_k": 5}}, got {text!r}')
    return value
