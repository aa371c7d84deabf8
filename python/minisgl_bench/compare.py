"""`compare A.json B.json`: every number of two results side by side, and whether they differ.

The path of a number in the file is its name, and repeated runs give it several values. With two
or more values in both files, they differ if their ranges do not overlap. With a single value in one
file, its noise is unknown, and only the ratio is shown. Warnings come first if the machines are
different or were busy.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from minisgl.errors import ConfigError
from minisgl_bench.arguments import benchmark_parser
from minisgl_bench.report import BUSY_SHARE

PIPED_WIDTH = 500  # wide enough that no line is cut when another program reads the output

# Whether a higher or a lower number is better. Other numbers are shown without a judgement.
_HIGHER = re.compile(
    r"(_per|_per_core|_tb|_gb|_tflop)_s|goodput|speedup|(hidden|cached)_share|share_kept|of_floor"
    r"|(^|[._])ratio"
)
_LOWER = re.compile(r"_ms|_us|_s$|(^|[._])seconds|yardsticks")

# Not compared: inputs of the run, columns for plots, and the values of single runs.
_SKIP = (
    *("environment", "target", "server", "slo", "load_before", "workload"),
    *("requests", "curves", "server_counters", "median"),
)

# Items of a list are identified by their names, or else by these sizes.
_NAMES = ("name", "workload")
_SIZES = (
    *("shape", "heads", "rows", "context", "decode", "backend", "communicator"),
    *("rate", "batch", "bytes", "tokens", "watermark_tokens", "sampling", "gb"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One number. verdict: better, worse, noise (ranges overlap), one run, or differs."""

    name: str
    a: float
    b: float
    verdict: str

    @property
    def ratio(self) -> float | None:
        return self.b / self.a if self.a else None


def compare(a: dict[str, Any], b: dict[str, Any]) -> list[Row]:
    """Return a row for each number that both results have."""
    left, right = _collect(a), _collect(b)
    return [
        Row(
            name=name,
            a=statistics.median(left[name]),
            b=statistics.median(right[name]),
            verdict=_verdict(name, left[name], right[name]),
        )
        for name in left
        if name in right
    ]


def cautions(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Return warnings: differences of the machines and settings, and other work on them."""
    said = []
    for name in ("cpu", "cores", "gpu", "python"):
        left, right = (result.get("environment", {}).get(name) for result in (a, b))
        if left != right:
            said.append(f"{name} differs: {left} and {right}")
    for label, result in (("A", a), ("B", b)):
        loads = [result, *result.get("runs", [])]
        for variant in result.get("variants", []):
            loads += variant["runs"]
        busy = max(part.get("load_before", {}).get("busy_share", 0) for part in loads)
        if busy > BUSY_SHARE:
            said.append(f"{label} ran while other work took {busy:.0%} of the machine")
    for name in ("slo", "workload"):
        left, right = (result.get(name) or _first_run(result).get(name) for result in (a, b))
        if left != right:
            said.append(f"{name} differs: {left} and {right}")
    return said


def _first_run(result: dict[str, Any]) -> dict[str, Any]:
    runs = result.get("runs")
    return runs[0] if isinstance(runs, list) and runs and isinstance(runs[0], dict) else {}


def _collect(result: dict[str, Any]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for path, value in _numbers(result, ()):
        found.setdefault(".".join(path), []).append(value)
    return found


def _numbers(node: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield numbers with their paths. All runs of a thing have one path; names identify list
    items."""
    if isinstance(node, bool):
        return
    if isinstance(node, int | float):
        yield path, float(node)
    elif isinstance(node, dict):
        for name, value in node.items():
            if name not in _SKIP:
                yield from _numbers(value, path if name == "summary" else (*path, name))
    elif isinstance(node, list) and path and path[-1] == "runs":
        for item in node:
            yield from _numbers(item, path[:-1])
    elif isinstance(node, list):
        for item in node:
            if isinstance(item, dict) and (name := _name_of(item)) is not None:
                sizes = (
                    () if any(key in item for key in _NAMES) else _SIZES
                )  # its name identifies it
                numbers = {key: value for key, value in item.items() if key not in sizes}
                yield from _numbers(numbers, (*path, name))


def _name_of(item: dict[str, Any]) -> str | None:
    names = [item[key] for key in _NAMES if key in item]
    sizes = [f"{key} {item[key]}" for key in _SIZES if key in item]
    others = [item[key] for key in ("dtype", "door") if key in item]
    return " ".join([*(names or sizes), *others]) or None


def _verdict(name: str, a: list[float], b: list[float]) -> str:
    if a == b:
        return ""
    if min(len(a), len(b)) < 2:
        return "one run"
    if min(a) <= max(b) and min(b) <= max(a):
        return "noise"
    higher = statistics.median(b) > statistics.median(a)
    if _HIGHER.search(name):
        return "better" if higher else "worse"
    if _LOWER.search(name):
        return "worse" if higher else "better"
    return "differs"


def read_result(path: str | Path) -> dict[str, Any]:
    """Return the content of a result. Raises ConfigError if the file is none."""
    try:
        result = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(result, dict):
        raise ConfigError(f"{path} holds no result: expected a JSON object")
    return result


def _expression(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"no regular expression: {error}, got {text!r}") from None


def main(argv: list[str]) -> int:
    parser = benchmark_parser(__name__, __doc__)
    parser.add_argument("a", metavar="A.json", help="a result of any benchmark, before")
    parser.add_argument("b", metavar="B.json", help="a result of the same benchmark, after")
    parser.add_argument(
        "--only", type=_expression, default="", help="rows whose name matches this expression"
    )
    args = parser.parse_args(argv)
    console = Console()
    if not console.is_terminal:
        console = Console(width=PIPED_WIDTH)
    try:
        a, b = read_result(args.a), read_result(args.b)
    except ConfigError as error:
        console.print(str(error), style="red", markup=False)
        return 2
    for caution in cautions(a, b):
        console.print(caution, style="yellow", markup=False)
    table = Table("", "A", "B", "B / A", "", box=None)
    styles = {"better": "green", "worse": "red", "noise": "dim"}
    for row in compare(a, b):
        if args.only.search(row.name):
            ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
            table.add_row(
                row.name, f"{row.a:,.6g}", f"{row.b:,.6g}", ratio, row.verdict,
                style=styles.get(row.verdict),
            )  # fmt: skip
    if not table.row_count:
        matching = f" with a name that matches {args.only.pattern!r}" if args.only.pattern else ""
        console.print(f"no number{matching} is in both results", style="red", markup=False)
        return 2
    console.print(table)
    return 0
