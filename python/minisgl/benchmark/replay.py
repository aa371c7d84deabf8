"""Sends a server the requests of a recording: the same arrivals, lengths and common prefixes.

The requests of a recording (`--record`) come again at their times, with random tokens: equal
blocks have equal tokens. Further flags are those of `minisgl bench online`, such as --speed 2.
With `--plans` no server is asked: the scheduler plans the recorded steps again over the fake
executor (`minisgl.benchmark.replay_plans`).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from minisgl.benchmark import online
from minisgl.benchmark.arguments import benchmark_parser
from minisgl.errors import ConfigError

PERCENTILES: Final = (50, 90, 99)


def requests_of(path: Path) -> list[dict[str, Any]]:
    """Return the requests that ended, in the order of their arrival, each with its end.

    Raises ConfigError if the file is no recording, or has none.
    """
    arrivals: dict[int, dict[str, Any]] = {}
    requests = []
    for record in records_of(path):
        if arrival := record.get("arrival"):
            arrivals[arrival["uid"]] = arrival
        elif (end := record.get("end")) and (arrival := arrivals.pop(end["uid"], None)):
            requests.append(arrival | end)
    if not requests:
        raise ConfigError(f"{path} has no request that began and ended")
    return sorted(requests, key=lambda request: request["at_s"])


def records_of(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of FILE.1, if there is one, and of FILE."""
    older = path.with_name(path.name + ".1")
    for file in (older, path) if older.exists() else (path,):
        try:
            lines = file.read_bytes().splitlines()
        except OSError as error:
            raise ConfigError(f"the recording cannot be read: {error}") from error
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
                if not record.keys() & {"config", "arrival", "leave", "end", "frame"}:
                    raise ValueError("it has another key")
            except (ValueError, AttributeError) as error:
                if file == path and number == len(lines):
                    return  # it is still being written
                raise ConfigError(f"{file}, line {number} is of no recording: {error}") from None
            yield record


def write_trace(requests: list[dict[str, Any]], path: Path) -> None:
    """Write the requests in the form of Qwen-Bailian's traces: blocks of 16, times in seconds."""
    with path.open("w", encoding="utf-8") as file:
        for request in requests:
            row = {
                "chat_id": request["uid"],
                "timestamp": request["at_s"],
                "input_length": request["input_length"],
                "output_length": max(request["output_length"], 1),
                "hash_ids": request["hash_ids"],
            }
            file.write(json.dumps(row) + "\n")


def summary(requests: list[dict[str, Any]]) -> str:
    """Return a text with the times and the cached share of the recorded requests."""
    done = [request for request in requests if "queued_s" in request]
    first = [1e3 * (request["queued_s"] + request["prefill_s"]) for request in done] or [0.0]
    whole = [
        1e3 * (request["queued_s"] + request["prefill_s"] + request["decode_s"]) for request in done
    ] or [0.0]
    prompt = sum(request["input_length"] for request in done)
    cached = sum(request["cached_tokens"] for request in done)
    seconds = requests[-1]["at_s"] - requests[0]["at_s"]
    lines = [
        f"recorded: {len(requests)} requests in {seconds:.1f} s, "
        f"{len(requests) - len(done)} failed, {cached / max(prompt, 1):.0%} of the prompt tokens "
        "from the prefix cache"
    ]
    for name, values in (("to the first token", first), ("to the end", whole)):
        points = np.percentile(values, PERCENTILES)
        shown = ", ".join(f"p{p} {value:.1f}" for p, value in zip(PERCENTILES, points, strict=True))
        lines.append(f"  ms {name}, in the engine: {shown}")
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    parser = benchmark_parser(__name__, __doc__)
    parser.prog = "minisgl replay"
    parser.usage = "minisgl replay FILE [--plans | flags of minisgl bench online]"
    parser.add_argument("file", type=Path, metavar="FILE", help="a recording of --record FILE")
    parser.add_argument(
        "--plans",
        action="store_true",
        help="let the scheduler plan the recorded steps again, over a fake device that checks the "
        "KV cache, and say where a plan differs; needs a recording from its start",
    )
    parser.add_argument(
        "flags", nargs=argparse.REMAINDER, help="flags of minisgl bench online"
    ).required = False
    args = parser.parse_args(argv)
    flags = [flag for flag in args.flags if flag != "--plans"]
    if args.plans or len(flags) < len(args.flags):
        if flags:
            parser.error(f"--plans asks no server: leave out {' '.join(flags)}")
        from minisgl.benchmark.replay_plans import replay_plans

        print(replay_plans(args.file))
        return 0
    requests = requests_of(args.file)
    print(summary(requests), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / args.file.name
        write_trace(requests, trace)
        return online.main(["--workload", "trace", "--trace", str(trace), *flags])
