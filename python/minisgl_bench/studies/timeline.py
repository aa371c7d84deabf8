"""Draws the file of `--log-steps`: the parts of each step, its rows and tokens, the waits.

It writes a PNG, an HTML page with the picture and the longest steps (no network, no other file),
and a trace for https://ui.perfetto.dev: Chrome's trace-event format with one track for the host's
parts and one for the step on the device.
"""

from __future__ import annotations

import base64
import contextlib
import html
import io
import json
from pathlib import Path
from typing import Any

import matplotlib
import msgspec
import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure
from rich.console import Console

from minisgl.errors import ConfigError
from minisgl.scheduler.loop import PARTS
from minisgl.scheduler.meter import StepRecord
from minisgl_bench.arguments import benchmark_parser, from_zero

FIRST_PARTS, LAST_PARTS = PARTS[:3], PARTS[3:]
"""The parts of the turn that launched a step, and of the turn that settled it."""
NUM_LONGEST = 12
PAUSE_S = 0.002  # a longer time between steps is drawn as sleep
HOST, DEVICE = 1, 2  # tracks of the trace

STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
img{max-width:100%}table{border-collapse:collapse;font-variant-numeric:tabular-nums}
td,th{padding:.15rem .7rem;text-align:right;border-bottom:1px solid #ddd}"""


def read_steps(path: Path) -> list[StepRecord]:
    """Return the steps of a file. Raises ConfigError, with the line, if it is no such file."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    decoder = msgspec.json.Decoder(StepRecord)
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(decoder.decode(line))
        except msgspec.MsgspecError as error:
            if number == len(lines) and not line.endswith(b"}"):
                break  # the server was killed while it wrote
            raise ConfigError(f"{path}:{number} {_fault(line, error)}") from error
    if not records:
        raise ConfigError(f"{path} holds no step; was a request served while it was written?")
    return records


def _fault(line: bytes, error: msgspec.MsgspecError) -> str:
    """Return the error message for a line that does not decode."""
    with contextlib.suppress(msgspec.MsgspecError):
        found = msgspec.json.decode(line, type=dict[str, Any])
        missing = [name for name in StepRecord.__struct_fields__ if name not in found]
        if missing and {"step", "start_s", "settle_s"} <= found.keys():  # fields of every version
            return (
                f"lacks these fields: {', '.join(missing)}. Another version of minisgl wrote this "
                "log; record it anew, with --log-steps of this one"
            )
    return f"is no step of --log-steps: {error}"


def busy_s(record: StepRecord) -> float:
    """Return the seconds from the start of the step's plan until its ids were on the host."""
    waited_s = record.wait_us / 1e6
    return record.settle_s + waited_s - record.start_s


def draw(records: list[StepRecord]) -> Figure:
    figure = Figure(figsize=(13, 12), layout="constrained")
    parts, tokens, requests, pages = figure.subplots(4, 1, sharex=True)
    rows = [
        (*(getattr(r, f"{part}_us") / 1e3 for part in PARTS), r.decodes, r.tokens - r.decodes,
         r.running, r.waiting, r.used_pages / r.num_pages, r.cached_pages / r.num_pages)
        for r in records
    ]  # fmt: skip
    at, (*values, decodes, prompt, running, waiting, used, cached) = _with_pauses(
        records, np.array(rows)
    )
    parts.stackplot(at, values, labels=PARTS, step="post")
    parts.set(ylabel="ms", title="a step's time in the loop, by part")
    tokens.stackplot(at, decodes, prompt, labels=("decode rows", "prompt tokens"), step="post")
    tokens.set(ylabel="tokens", yscale="symlog", title="what it computed")
    for name, counts in (("running", running), ("waiting", waiting)):
        requests.step(at, counts, where="post", label=name)
    requests.set(ylabel="requests", title="who was there")
    pages.stackplot(at, used, cached, labels=("used", "kept for their prefix"), step="post")
    pages.set(ylabel="share of the KV pages", xlabel="seconds since the loop began", ylim=(0, 1))
    for axis in (parts, tokens, requests, pages):
        axis.grid(alpha=0.3)
        axis.legend(loc="upper right")
    return figure


def _with_pauses(
    records: list[StepRecord], rows: npt.NDArray[Any]
) -> tuple[list[float], npt.NDArray[Any]]:
    """Return the times and the columns of `rows`, with a row of zeros wherever the loop slept."""
    at: list[float] = []
    drawn = []
    for index, (record, row) in enumerate(zip(records, rows, strict=True)):
        at.append(record.start_s)
        drawn.append(row)
        end_s = record.settle_s + sum(getattr(record, f"{part}_us") for part in LAST_PARTS) / 1e6
        if index + 1 == len(records) or records[index + 1].start_s > end_s + PAUSE_S:
            at.append(end_s)
            drawn.append(np.zeros_like(row))
    return at, np.array(drawn).T


def trace_events(records: list[StepRecord]) -> dict[str, Any]:
    """Return complete events ("X") and counters ("C") in Chrome's trace-event format, in us."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "tid": track, "name": "thread_name", "args": {"name": name}}
        for track, name in ((HOST, "host"), (DEVICE, "steps"))
    ]

    def event(track: int, name: str, start_us: float, us: float, record: StepRecord) -> None:
        args = {key: getattr(record, key) for key in ("step", "rows", "decodes", "tokens")}
        events.append(
            {"ph": "X", "pid": 0, "tid": track, "name": name, "ts": start_us, "dur": us}
            | {"args": args}
        )

    for record in records:
        for first_s, names in ((record.start_s, FIRST_PARTS), (record.settle_s, LAST_PARTS)):
            start_us = first_s * 1e6
            for part in names:
                us = getattr(record, f"{part}_us")
                event(HOST, part, start_us, us, record)
                start_us += us
        prompt = record.tokens - record.decodes
        name = f"step {record.step}: {record.decodes} decodes, {prompt} prompt tokens"
        event(DEVICE, name, record.start_s * 1e6, busy_s(record) * 1e6, record)
        events.append(
            {"ph": "C", "pid": 0, "name": "requests", "ts": record.start_s * 1e6}
            | {"args": {"running": record.running, "waiting": record.waiting}}
        )
        events.append(
            {"ph": "C", "pid": 0, "name": "KV pages", "ts": record.start_s * 1e6}
            | {"args": {"used": record.used_pages, "cached": record.cached_pages}}
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def page(records: list[StepRecord], png: bytes, title: str) -> str:
    """Return a self-contained page: totals, the picture, the longest steps."""
    total_s = records[-1].settle_s - records[0].start_s
    sums = {part: sum(getattr(record, f"{part}_us") for record in records) / 1e6 for part in PARTS}
    facts = ", ".join(f"{part} {seconds:.3f} s" for part, seconds in sums.items())
    longest = sorted(records, key=busy_s, reverse=True)[:NUM_LONGEST]
    rows = "".join(
        f"<tr><td>{r.step}</td><td>{r.start_s:.3f}</td><td>{busy_s(r) * 1e3:.2f}</td>"
        + "".join(f"<td>{getattr(r, f'{part}_us') / 1e3:.2f}</td>" for part in PARTS)
        + f"<td>{r.decodes}</td><td>{r.tokens - r.decodes}</td></tr>"
        for r in longest
    )
    columns = ("step", "start, s", "took, ms", *(f"{part}, ms" for part in PARTS))
    columns += ("decodes", "prompt tokens")
    head = "".join(f"<th>{column}</th>" for column in columns)
    image = base64.b64encode(png).decode()
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title>"
        f"<style>{STYLE}</style><h1>{html.escape(title)}</h1>"
        f"<p>{len(records):,} steps in {total_s:.2f} s: {facts}.</p>"
        f'<img alt="" src="data:image/png;base64,{image}">'
        f"<h2>The longest steps</h2><table><tr>{head}</tr>{rows}</table>\n"
    )


def main(argv: list[str]) -> int:
    parser = benchmark_parser(__name__, __doc__)
    parser.add_argument("steps", type=Path, metavar="STEPS.jsonl", help="a file of --log-steps")
    parser.add_argument("--out", type=Path, default=None, help="folder (default: beside the file)")
    parser.add_argument(
        "--first", type=from_zero, default=0.0, metavar="S", help="leave out before"
    )
    parser.add_argument(
        "--last", type=from_zero, default=np.inf, metavar="S", help="leave out after"
    )
    args = parser.parse_args(argv)
    matplotlib.use("agg")  # draws to memory, needs no display
    try:
        records = [r for r in read_steps(args.steps) if args.first <= r.start_s <= args.last]
        if not records:
            raise ConfigError(f"no step of {args.steps} is between --first and --last")
    except ConfigError as error:
        Console(stderr=True).print(str(error), style="red", markup=False)
        return 2
    folder = args.out or args.steps.parent
    folder.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    draw(records).savefig(buffer, format="png", dpi=110)
    stem = folder / args.steps.stem
    outputs = {
        ".png": buffer.getvalue(),
        ".html": page(records, buffer.getvalue(), args.steps.name).encode(),
        ".trace.json": json.dumps(trace_events(records)).encode(),
    }
    for ending, content in outputs.items():
        path = stem.with_name(stem.name + ending)
        path.write_bytes(content)
        print(f"wrote {path}")
    return 0
