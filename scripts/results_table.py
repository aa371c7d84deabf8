"""Makes the tables of README.md and docs/performance.md from `benchmarks/results/`.

    python scripts/results_table.py [--short] [--write PAGE.md]

It prints the page's, with --short the three rows of README; --write puts it between the two marks
of that page. A test compares both pages with it. A peer's figure stands only beside the figure of
the same door: its offline class beside `LLM.generate`, its server beside ours.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minisgl.errors import ConfigError

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
PEERS = "peers-h200"
BEGIN, END = "<!-- scripts/results_table.py -->", "<!-- end of the table -->"

_PEERS_DOOR = {"LLM.generate": "offline", "HTTP": "HTTP"}  # our door: the same door of a peer


@dataclass(frozen=True, slots=True)
class Row:
    """A row. file: of `RESULTS`. key: the workload there. shown: the figure, of `_FORMATS`."""

    model: str
    workload: str
    file: str
    key: str
    shown: str = "tokens_per_s"


_MIXED = "256 requests, 100 to 1,024 tokens in and out"
_SINGLE = "one request, 128 in, 512 out"
_PREFILL = "32 prompts of 4,096, 1 out"
_SMALL, _MIDDLE = "Qwen3-0.6B, 1 GPU", "Qwen3-14B, 1 GPU"
_LARGE = "Qwen3-32B, 4 GPUs"
ROWS = (
    Row(_SMALL, _MIXED, "offline-qwen3-0.6b", "throughput"),
    Row(_SMALL, _MIXED, "serving-qwen3-0.6b", "throughput"),
    Row(_SMALL, _SINGLE, "offline-qwen3-0.6b", "single"),
    Row(_SMALL, _PREFILL, "offline-qwen3-0.6b", "prefill"),
    Row(_SMALL, "128 requests with a common prefix of 4,096, 32 out", "offline-qwen3-0.6b",
        "shared", "seconds"),
    Row(_MIDDLE, _MIXED, "offline-qwen3-14b", "throughput"),
    Row(_MIDDLE, _SINGLE, "offline-qwen3-14b", "single"),
    Row(_MIDDLE, _PREFILL, "offline-qwen3-14b", "prefill"),
    Row("Qwen3-30B-A3B, 1 GPU", _MIXED, "offline-qwen3-30b-a3b", "throughput"),
    Row(_LARGE, _MIXED, "serving-qwen3-32b-tp4", "throughput"),
    Row(_LARGE, f"{_SINGLE}: time per token", "serving-qwen3-32b-tp4", "single", "itl_p50_ms"),
)  # fmt: skip
SHORT = (ROWS[0], ROWS[6], ROWS[9])

_FORMATS = {
    "tokens_per_s": "{:,.0f} tok/s",
    "seconds": "{:.3f} s",
    "itl_p50_ms": "{:.2f} ms",
}


def make_table(results: Path = RESULTS, rows: tuple[Row, ...] = ROWS) -> str:
    """Return the table as Markdown. Raises ConfigError if a result is missing."""
    peers = _read(results, PEERS)
    engines: dict[str, dict[str, Any]] = peers["engines"]
    names = [
        f"{name} {engine['version']} ({', '.join(engine['dates'])})"
        for name, engine in engines.items()
    ]
    heads = ["model", "workload", "door", "Mini-SGLang", "of the floor", *names, "commit"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in rows:
        content = _read(results, row.file)
        values = _find(content, row)
        commit = content["environment"]["commit"]
        commit = commit[:7] + "+" * commit.endswith("+")  # "+": with changes, see the file
        # The share in the file is rounded.
        of_floor = values["floor_s"] / (values.get("seconds") or values["duration_s"])
        door = _door(values)
        figures = _peer_figures(peers, row, door)
        cells = [row.model, row.workload, door, _own_figure(row, values), f"{of_floor:.2f}"]
        cells += [_range(row.shown, figures[name]) if name in figures else "" for name in engines]
        lines.append("| " + " | ".join([*cells, commit]) + " |")
    return "\n".join(lines)


def _read(results: Path, file: str) -> dict[str, Any]:
    path = results / f"{file}.json"
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the table needs {path}: {error}") from error
    return content


def _find(content: dict[str, Any], row: Row) -> dict[str, Any]:
    """Return the row's values. If both doors were measured, these are `LLM.generate`'s."""
    found = [values for values in content["rows"] if values["workload"] == row.key]
    if not found:
        raise ConfigError(f"{row.file}.json has no row {row.key!r}")
    values = min(found, key=lambda values: _door(values) != "LLM.generate")
    return {**values, **values.get("median", {})}


def _door(values: dict[str, Any]) -> str:
    return str(values.get("door", "HTTP"))  # `offline` names its door, `serving` has only HTTP


def _own_figure(row: Row, values: dict[str, Any]) -> str:
    if row.shown == "itl_p50_ms":
        value = values["itl_ms"]["p50"]
    elif row.shown == "seconds":
        value = values["seconds"]
    else:
        value = values.get("tokens_per_s") or values["output_tokens_per_s"]
    return _FORMATS[row.shown].format(value)


def _peer_figures(peers: dict[str, Any], row: Row, door: str) -> dict[str, dict[str, float]]:
    """Return {engine: {"low", "high"}} for the same workload, shown figure and door."""
    shape = row.file.partition("-")[2]
    for values in peers["rows"]:
        same = values["name"] == f"{shape} {row.key}" and values["door"] == _PEERS_DOOR.get(door)
        if same and row.shown in values:
            found: dict[str, dict[str, float]] = values[row.shown]
            return found
    return {}


def _range(shown: str, figure: dict[str, float]) -> str:
    low, high = (_FORMATS[shown].format(figure[key]) for key in ("low", "high"))
    return low if low == high else f"{low.partition(' ')[0]} to {high}"


def with_table(page: str, table: str) -> str:
    """Return `page` with `table` between its marks. Raises ConfigError if a mark is missing."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ConfigError(f"the page lacks {BEGIN} and {END}, which mark the table's place")
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON files")
    parser.add_argument("--short", action="store_true", help="the README's three rows")
    parser.add_argument("--write", type=Path, metavar="PAGE.md", help="page to put the table into")
    args = parser.parse_args(argv)
    try:
        table = make_table(args.results, SHORT if args.short else ROWS)
        if args.write:
            page = args.write.read_text(encoding="utf-8")
            args.write.write_text(with_table(page, table), encoding="utf-8")
    except (ConfigError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
