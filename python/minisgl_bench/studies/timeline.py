"""Makes a trace for https://ui.perfetto.dev of a file of `--log-steps`.

It is in Chrome's trace-event format: one track has the host's parts, one the step on the device,
and counters have the tokens, the requests and the pages of the KV pool.
"""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from minisgl.errors import ConfigError
from minisgl.scheduler.loop import PARTS
from minisgl_bench.arguments import benchmark_parser, from_zero
from minisgl_gateway.watch.steps import StepRecord

FIRST_PARTS, LAST_PARTS = PARTS[:3], PARTS[3:]
"""The parts of the turn that launched a step, and of the turn that settled it."""
HOST, DEVICE = 1, 2  # tracks of the trace


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
        counts = {
            "tokens": {"decodes": record.decodes, "prompt": prompt},
            "requests": {"running": record.running, "waiting": record.waiting},
            "KV pages": {"used": record.used_pages, "cached": record.cached_pages},
        }
        events += [
            {"ph": "C", "pid": 0, "name": name, "ts": record.start_s * 1e6, "args": args}
            for name, args in counts.items()
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def main(argv: list[str]) -> int:
    parser = benchmark_parser(__name__, __doc__)
    parser.add_argument("steps", type=Path, metavar="STEPS.jsonl", help="a file of --log-steps")
    parser.add_argument("--out", type=Path, default=None, help="folder (default: beside the file)")
    parser.add_argument(
        "--first", type=from_zero, default=0.0, metavar="S", help="leave out before"
    )
    parser.add_argument(
        "--last", type=from_zero, default=math.inf, metavar="S", help="leave out after"
    )
    args = parser.parse_args(argv)
    try:
        records = [r for r in read_steps(args.steps) if args.first <= r.start_s <= args.last]
        if not records:
            raise ConfigError(f"no step of {args.steps} is between --first and --last")
    except ConfigError as error:
        Console(stderr=True).print(str(error), style="red", markup=False)
        return 2
    folder = args.out or args.steps.parent
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{args.steps.stem}.trace.json"
    path.write_text(json.dumps(trace_events(records)), encoding="utf-8")
    print(f"wrote {path}: open it in https://ui.perfetto.dev")
    return 0
