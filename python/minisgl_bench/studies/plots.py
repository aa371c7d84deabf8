"""Pictures of results: PNG files, and one HTML report that needs no network and no other file.

`plots RESULT.json... --out FOLDER` draws the figures of each kind of result. Files of the kind
online share their axes, so that engines or settings can be compared.
"""

from __future__ import annotations

import base64
import html
import io
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from rich.console import Console

from minisgl.errors import ConfigError
from minisgl_bench.arguments import benchmark_parser
from minisgl_bench.compare import read_result
from minisgl_bench.studies.scheduler import PARTS

Results = dict[str, dict[str, Any]]
"""The content of each file, by its name (see `names_of`)."""

STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
img{max-width:100%}table{border-collapse:collapse;font-variant-numeric:tabular-nums}
td,th{padding:.15rem .7rem;text-align:right;border-bottom:1px solid #ddd}
pre{background:#f5f5f5;padding:.7rem;overflow:auto}"""


def draw(results: Results) -> Iterator[tuple[str, Figure]]:
    """Yield the name and the figure of everything that can be drawn."""
    online = {
        name: result["runs"][0] for name, result in results.items() if _kind(result, "online")
    }
    if online:
        yield "latency", latency(online)
    for name, result in results.items():
        if _kind(result, "sweep"):
            yield f"{name}-sweep", sweep(result)
        elif _kind(result, "scheduler"):
            yield f"{name}-steps", steps(result)
            yield f"{name}-tree", tree_share(result)
        elif _kind(result, "ablation"):
            firsts = {variant["name"]: variant["runs"][0] for variant in result["variants"]}
            yield f"{name}-latency", latency(firsts)
            yield f"{name}-medians", medians(result)


def latency(runs: dict[str, dict[str, Any]]) -> Figure:
    """The distributions of TTFT, ITL and E2E on a log axis, and TTFT over the run."""
    figure = Figure(figsize=(11, 7), layout="constrained")
    axes = figure.subplots(2, 2)
    for label, run in runs.items():
        columns = run["requests"]
        for axis, name in ((axes[0, 0], "ttft_ms"), (axes[1, 0], "e2e_ms")):
            values = np.sort(columns[name])
            axis.plot(values, np.linspace(0, 100, len(values)), label=label)
        curve = run["curves"]["itl_ms"]
        axes[0, 1].plot(curve, np.linspace(0, 100, len(curve)), label=label)
        axes[1, 1].plot(columns["sent_s"], columns["ttft_ms"], ".", label=label, alpha=0.6)
    for axis, title in (
        (axes[0, 0], "time to first token"),
        (axes[0, 1], "inter-token latency"),
        (axes[1, 0], "end to end"),
    ):
        axis.set(title=title, xlabel="ms", ylabel="% at most", xscale="log")
    axes[1, 1].set(title="time to first token over the run", xlabel="sent, s", ylabel="ms")
    for axis in axes.flat:
        axis.grid(alpha=0.3)
        axis.legend()
    return figure


def sweep(result: dict[str, Any]) -> Figure:
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    rates = [point["rate"] for point in result["points"]]
    summaries = [point["summary"] for point in result["points"]]
    left.plot(rates, [summary["goodput_per_s"] for summary in summaries], "o-", label="goodput")
    left.plot(rates, [s["requests_per_s"] for s in summaries], "o--", label="throughput")
    left.plot(rates, rates, ":", color="gray", label="offered")
    left.set(title=f"goodput under {_slo(result['slo'])}", xlabel="requests/s", ylabel="requests/s")
    for name, style in (("p50", "o-"), ("p99", "o--")):
        values = [summary["ttft_ms"].get(name, np.nan) for summary in summaries]
        right.plot(rates, values, style, label=f"TTFT {name}")
        values = [summary["itl_ms"].get(name, np.nan) for summary in summaries]
        right.plot(rates, values, style, label=f"ITL {name}")
    right.set(title="latency", xlabel="requests/s", ylabel="ms", yscale="log")
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.legend()
    return figure


def steps(result: dict[str, Any]) -> Figure:
    """The host time of a step by part."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    axis = figure.subplots()
    rows = result["steps"]
    bottom = np.zeros(len(rows))
    for part in PARTS:
        values = np.array([row[f"{part}_us"] for row in rows])
        axis.bar([row["name"] for row in rows], values, bottom=bottom, label=part)
        bottom += values
    axis.set(title="host time of a step by part", ylabel="µs", xlabel="running requests")
    axis.legend()
    return figure


def tree_share(result: dict[str, Any]) -> Figure:
    """The scheduler's time for a request, with the prefix tree and without."""
    figure = Figure(figsize=(6, 3), layout="constrained")
    axis = figure.subplots()
    names = [row["name"] for row in result["tree_share"]]
    pages = np.array([row["cache_us_a_request"] for row in result["tree_share"]])
    total = np.array([row["scheduling_us_a_request"] for row in result["tree_share"]])
    axis.barh(names, pages, label="finding, keeping and evicting pages")
    axis.barh(names, total - pages, left=pages, label="the rest")
    axis.set(title="scheduling of a request", xlabel="µs")
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def medians(result: dict[str, Any]) -> Figure:
    """The variants of an ablation: medians as bars, rounds as dots."""
    figure = Figure(figsize=(13, 3.6), layout="constrained")
    shown = (
        ("TTFT p50, ms", "ttft_ms", "p50"),
        ("TTFT p99, ms", "ttft_ms", "p99"),
        ("largest ITL, p50, ms", "largest_itl_ms", "p50"),
        ("output tokens/s", "output_tokens_per_s", None),
        ("peak memory, MiB", "peak_memory_mib", None),
    )
    names = [variant["name"] for variant in result["variants"]]
    for axis, (title, key, field) in zip(figure.subplots(1, len(shown)), shown, strict=True):
        for index, variant in enumerate(result["variants"]):
            found = [run["summary"][key] for run in variant["runs"]]
            values = [value[field] for value in found] if field else found
            axis.bar(index, np.median(values), color=f"C{index}", alpha=0.6)
            axis.plot([index] * len(values), values, ".", color="black")
        axis.set_xticks(range(len(names)), names)
        axis.set_title(title, fontsize=10)
    return figure


# --- the report --------------------------------------------------------------------------------


def report(results: Results, pictures: dict[str, bytes]) -> str:
    """Return one page with the pictures, and a table and the environment of each result."""
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>Mini-SGLang benchmarks</title>",
        f"<style>{STYLE}</style><h1>Mini-SGLang benchmarks</h1>",
    ]
    for name, png in pictures.items():
        data = base64.b64encode(png).decode()
        parts.append(f'<h2>{html.escape(name)}</h2><img alt="" src="data:image/png;base64,{data}">')
    for name, result in results.items():
        parts.append(f"<h2>{html.escape(name)}</h2>{_tables(result)}")
        about = {
            key: result[key]
            for key in (
                "environment",
                "load_before",
                "target",
                "slo",
                "workload",
                "server_counters",
            )
            if result.get(key)
        }
        parts.append(f"<pre>{html.escape(json.dumps(about, indent=1))}</pre>")
    return "\n".join(parts) + "\n"


def _tables(result: dict[str, Any]) -> str:
    """Return the tables of a result: summaries are rows of one table, other lists tables of their
    own."""
    named = [(f"run {index + 1}", run) for index, run in enumerate(result.get("runs", []))]
    named += [(f"{point['rate']:g} requests/s", point) for point in result.get("points", [])]
    for variant in result.get("variants", []):
        named += [(f"{variant['name']}, {i + 1}", run) for i, run in enumerate(variant["runs"])]
    summaries = [(label, run["summary"]) for label, run in named if "summary" in run]
    # `serving`: the medians of each workload's runs.
    summaries += [
        (row["workload"], row["median"]) for row in result.get("rows", []) if "median" in row
    ]
    parts = []
    if rows := [{"": label, **_flat(summary)} for label, summary in summaries]:
        parts.append(_table(rows))
    for value in result.values():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            parts += [] if {"runs", "summary"} & value[0].keys() else [_table(value)]
    return "".join(parts)


def _flat(summary: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name in ("requests_per_s", "output_tokens_per_s", "goodput_per_s", "cached_share"):
        flat[name] = summary.get(name)
    for name in ("ttft_ms", "itl_ms", "largest_itl_ms", "tpot_ms", "e2e_ms"):
        for field in ("p50", "p99"):
            flat[f"{name.removesuffix('_ms')} {field} ms"] = summary.get(name, {}).get(field)
    return flat


def _table(rows: list[dict[str, Any]]) -> str:
    """Return a table with a column for each key that some row has. Dicts in rows are left out."""
    columns = dict.fromkeys(
        key for row in rows for key, value in row.items() if not isinstance(value, dict)
    )
    head = "".join(f"<th>{html.escape(key)}</th>" for key in columns)
    body = "".join(
        "<tr>"
        + "".join(f"<td>{html.escape(_cell(row.get(key)))}</td>" for key in columns)
        + "</tr>"
        for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _cell(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else "" if value is None else str(value)


def _kind(result: dict[str, Any], kind: str) -> bool:
    return result.get("kind") == kind


def _slo(slo: dict[str, float | None]) -> str:
    bounds = [f"{name[:-3].upper()} ≤ {value:g} ms" for name, value in slo.items() if value]
    return ", ".join(bounds) or "no SLO"


def names_of(paths: Sequence[Path]) -> dict[str, Path]:
    """Return each file by its name without .json, with enough of its folders to tell all apart."""
    files = {Path(os.path.abspath(path)): path for path in paths}
    parts = [(*file.parent.parts[1:], file.name.removesuffix(".json")) for file in files]
    names: list[str] = []
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["-".join(own[-depth:]) for own in parts]
        if len(set(names)) == len(names):
            break
    return dict(zip(names, files.values(), strict=True))


def main(argv: list[str]) -> int:
    parser = benchmark_parser(__name__, __doc__)
    parser.add_argument(
        "results", nargs="+", type=Path, metavar="RESULT.json", help="results of any benchmarks"
    )
    parser.add_argument("--out", type=Path, default=Path("plots"), help="folder")
    args = parser.parse_args(argv)
    matplotlib.use("agg")  # draws to memory, needs no display
    try:
        results = {name: read_result(path) for name, path in names_of(args.results).items()}
    except ConfigError as error:
        Console(stderr=True).print(str(error), style="red", markup=False)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    pictures = {}
    for name, figure in draw(results):
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=110)
        pictures[name] = buffer.getvalue()
        (args.out / f"{name}.png").write_bytes(buffer.getvalue())
        print(f"wrote {args.out / name}.png")
    (args.out / "report.html").write_text(report(results, pictures), encoding="utf-8")
    print(f"wrote {args.out / 'report.html'}")
    return 0
