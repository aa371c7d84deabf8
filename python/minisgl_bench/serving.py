"""Measures a server over HTTP with a real shape: the time to the first token, then workloads.

It starts the server as a user would, on a checkpoint of random weights, several times; the last
server gets the workloads. Each workload runs once to compile and warm up, then `--repeats` times
with fresh ids. The floor of `minisgl_bench.floor` follows each time, for `--tp` cards without
communication. The workloads are those of `minisgl_bench.lengths`. The median ITL of batchN is the
time of a decode step of N rows.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from minisgl.benchmark.client import Target
from minisgl_bench.arguments import add_json, benchmark_parser, natural
from minisgl_bench.checkpoint import write_checkpoint
from minisgl_bench.counters import describe_server, difference, scrape
from minisgl_bench.floor import H200_MEMORY, floor_fields
from minisgl_bench.lengths import WORKLOADS, Workload, workloads
from minisgl_bench.report import machine_load, write_json
from minisgl_bench.shapes import SHAPES, shape_of
from minisgl_bench.shards import run_whole
from minisgl_bench.startup import first_token, running_server, start_parts
from minisgl_bench.workload import at_once


def main(argv: Sequence[str]) -> int:
    parser = benchmark_parser(__name__, __doc__)
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="qwen3-0.6b", help="the model's")
    add(
        "--workloads",
        default="throughput,streams,single,mixed",
        help=f"with commas: {', '.join(WORKLOADS)}, batchN",
    )
    add("--tp", type=natural, default=1, help="GPUs, and ranks of the server")
    add("--starts", type=natural, default=3, help="servers to start; the first may compile")
    add("--repeats", type=natural, default=3, help="runs, after one to warm up")
    add("--client-processes", type=natural, default=4, help="processes of the client")
    add("--dummy-weight", action="store_true", help="no weights on disk, as for a large shape")
    add_json(parser)
    add("server", nargs="*", help="flags of the server, after --")
    args = parser.parse_args(argv)
    if "--dp" in args.server:
        parser.error(
            "this measures one server, and --dp starts several: start them with `minisgl serve "
            "--dp N`, and measure them with `minisgl bench online --url URL`"
        )

    works, seeds = workloads(args.workloads), itertools.count()
    result: dict[str, Any] = {"load_before": machine_load()}
    result |= {"shape": args.shape, "tp": args.tp, "server": args.server}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / args.shape
        write_checkpoint(folder, SHAPES[args.shape], weights=not args.dummy_weight)
        flags = ["--model", str(folder), *args.server]
        flags += ["--tp", str(args.tp)] if args.tp > 1 else []
        flags += ["--dummy-weight"] if args.dummy_weight else []
        starts = result["starts"] = []
        rows = result["rows"] = []
        for index in range(args.starts):
            began = time.perf_counter()
            with running_server(*flags) as (url, _):
                start = {"ready_s": time.perf_counter() - began}
                start["first_token_s"] = first_token(url, began)
                seconds = {key: round(value, 2) for key, value in start.items()}
                starts.append(seconds | {"part_s": start_parts(url)})
                print(f"start {index}: {starts[-1]}")
                if index == args.starts - 1:
                    target = Target(url=url, model=describe_server(url)["model"])
                    for work in works:
                        rows.append(_measure(target, work, seeds, args))
                        if args.json:
                            write_json(args.json, result, is_whole=False)
    if args.json:
        write_json(args.json, result)
    return 0


def _median(values: list[Any]) -> Any:
    """Return the median of numbers; of dicts, the medians of their values."""
    if isinstance(values[0], dict):
        return {key: _median([value[key] for value in values]) for key in values[0]}
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in values):
        return values[0]
    return round(statistics.median(values), 4)


def _measure(
    target: Target, work: Workload, seeds: Iterator[int], args: argparse.Namespace
) -> dict[str, Any]:
    runs = []
    target.extra["temperature"] = work.temperature
    for _ in range(args.repeats + 1):
        prompts = work.prompts(SHAPES[args.shape]["vocab_size"], next(seeds))
        sessions = at_once(prompts, [output for _, output in work.requests])
        before = scrape(target.url)
        summary, cpu_s = run_whole(target, sessions, args.client_processes)
        summary["client_busiest_share"] = round(max(cpu_s) / summary["duration_s"], 3)
        summary["server_counters"] = difference(before, scrape(target.url))
        runs.append(summary)
    first, *rest = runs
    median = _median(rest)
    shape = shape_of(SHAPES[args.shape])
    floor = floor_fields(
        shape, work.requests, median["duration_s"], shared=work.shared, cards=args.tp,
        memory=H200_MEMORY,
    )  # fmt: skip
    ttft, itl = median["ttft_ms"], median["itl_ms"] or dict.fromkeys(("p50", "p99", "max"), 0.0)
    print(
        f"{work.name:<12}{median['output_tokens_per_s']:10,.0f} tok/s out, "
        f"{median['total_tokens_per_s']:,.0f} with prompts, in {median['duration_s']:.2f} s, "
        f"{floor['of_floor']:.2f} of the floor; TTFT p50/p99 {ttft['p50']:.0f}/{ttft['p99']:.0f} "
        f"ms; ITL p50/p99/max {itl['p50']:.2f}/{itl['p99']:.2f}/{itl['max']:.1f} ms; client "
        f"{median['client_busiest_share']:.2f}; all {[run['duration_s'] for run in rest]}, first "
        f"{first['duration_s']:.1f} s"
    )
    return {
        "workload": work.name,
        **floor,
        "first_run_s": first["duration_s"],
        "median": median,
        "runs": rest,
    }
