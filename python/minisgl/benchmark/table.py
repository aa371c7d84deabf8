"""Makes the README's table from `benchmarks/results/`, so that it says what was measured.

`table` prints it; `table --write README.md` puts it between the two marks there. A test keeps the
README equal to what this makes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from minisgl.benchmark.arguments import benchmark_parser
from minisgl.errors import ConfigError

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
BEGIN, END = "<!-- python -m minisgl.benchmark table -->", "<!-- end of the table -->"


@dataclass(frozen=True, slots=True)
class Row:
    """file: in `RESULTS`. shown: "rate" (tokens/s), "seconds", or "itl" (p50). peers: what
    mini-sglang and vLLM 0.26 gave, measured by others on machines of this kind."""

    label: str
    file: str
    workload: str
    shown: str
    peers: tuple[str, str]


_OFFLINE = "256 requests, 100 to 1,024 tokens in and out"
ROWS = (
    Row(f"Qwen3-0.6B, {_OFFLINE}", "offline-qwen3-0.6b", "throughput", "rate",
        ("22,458 tok/s, 0.62", "24,194 tok/s, 0.67")),
    Row("the same over HTTP, all at once", "serving-qwen3-0.6b", "throughput", "rate",
        ("15,620 tok/s", "")),
    Row("one request, 128 in, 512 out", "offline-qwen3-0.6b", "single", "rate",
        ("578 tok/s, 0.17", "608 tok/s, 0.17")),
    Row("prefill of 32 prompts of 4,096", "offline-qwen3-0.6b", "prefill", "rate",
        ("365,000 tok/s, 0.62", "345,000 tok/s, 0.59")),
    Row("128 requests sharing 4,096 tokens", "offline-qwen3-0.6b", "shared", "seconds",
        ("0.829 s", "0.551 s")),
    Row(f"Qwen3-14B, {_OFFLINE}", "offline-qwen3-14b", "throughput", "rate",
        ("6,335 tok/s, 0.72", "6,355 tok/s, 0.73")),
    Row("one request, 128 in, 512 out", "offline-qwen3-14b", "single", "rate",
        ("118 tok/s, 0.77", "118 tok/s, 0.77")),
    Row("prefill of 32 prompts of 4,096", "offline-qwen3-14b", "prefill", "rate",
        ("22,200 tok/s, 0.79", "22,500 tok/s, 0.80")),
    Row(f"Qwen3-30B-A3B, {_OFFLINE}", "offline-qwen3-30b-a3b", "throughput", "rate", ("", "")),
    Row(f"Qwen3-32B on four H200s over HTTP, {_OFFLINE}", "serving-qwen3-32b-tp4", "throughput",
        "rate", ("9,336 tok/s, 0.55", "8,340 tok/s, 0.50, offline")),
    Row("one request, time per token", "serving-qwen3-32b-tp4", "single", "itl",
        ("7.75 ms, 0.48", "7.2 ms, 0.52")),
)  # fmt: skip


def make_table(results: Path = RESULTS) -> str:
    """Markdown. Raises ConfigError where a result is missing."""
    lines = [
        "| workload | Mini-SGLang | of the floor | mini-sglang | vLLM 0.26 | commit |",
        "|---|---|---|---|---|---|",
    ]
    for row in ROWS:
        content, values = _find(results, row)
        commit = content["environment"]["commit"]
        commit = commit[:7] + "+" * commit.endswith("+")  # "+": with changes, see the file
        # The file's own share is rounded already.
        of_floor = values["floor_s"] / (values.get("seconds") or values["duration_s"])
        cells = (row.label, _value(row, values), f"{of_floor:.2f}", *row.peers, commit)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _find(results: Path, row: Row) -> tuple[dict[str, Any], dict[str, Any]]:
    path = results / f"{row.file}.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the table needs {path}: {error}") from error
    for values in content["rows"]:
        if values["workload"] == row.workload:
            return content, values | values.get("median", {})
    raise ConfigError(f"{path} has no row {row.workload!r}")


def _value(row: Row, values: dict[str, Any]) -> str:
    if row.shown == "itl":
        return f"{values['itl_ms']['p50']:.2f} ms"
    if row.shown == "seconds":
        return f"{values['seconds']:.3f} s"
    return f"{values.get('tokens_per_s') or values['output_tokens_per_s']:,.0f} tok/s"


def with_table(page: str, table: str) -> str:
    """`page` with `table` between its marks. Raises ConfigError where they are not there."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ConfigError(f"the page has no lines {BEGIN} and {END} to put the table between")
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def main(argv: list[str]) -> int:
    parser = benchmark_parser(__name__, __doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON files")
    parser.add_argument("--write", type=Path, metavar="PAGE.md", help="put it there")
    args = parser.parse_args(argv)
    try:
        table = make_table(args.results)
        if args.write:
            page = args.write.read_text(encoding="utf-8")
            args.write.write_text(with_table(page, table), encoding="utf-8")
    except (ConfigError, OSError) as error:
        Console(stderr=True).print(str(error), style="red", markup=False)
        return 2
    print(table)
    return 0
