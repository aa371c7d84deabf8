"""Measures a mechanism on and off on our server: `ablation radix | chunk | overlap | graphs`.

Each variant is a server with the built-in model (or `--model`). The rounds interleave the variants
forwards and backwards, so a machine that slows down affects all of them. Within a round every
variant gets the same requests. `plots` and `compare` read the results.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from minisgl.benchmark.client import Target
from minisgl.errors import ConfigError
from minisgl_bench import workload as workloads
from minisgl_bench.arguments import above_zero, add_json, benchmark_parser, integer, natural
from minisgl_bench.counters import scrape
from minisgl_bench.report import machine_load, write_json
from minisgl_bench.shards import run_sharded
from minisgl_bench.startup import running_server
from minisgl_bench.studies.scheduler import measure_overlap
from minisgl_bench.summary import Slo, summarize
from minisgl_bench.workload import Workload

MEMORY_EVERY_S = 0.05
REPORT_S = 0.2  # an engine reports when its work ends; the report may need this long
NUM_BACKGROUND = 8  # chunk: streams that run while prompts arrive
NUM_PROMPTS = 10
MIN_CONTEXT = 64  # tokens: room for chunk's prompt (3/4 of it) beside 16, and overlap's (1/8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    name: str
    flags: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class LocalServer:
    """A running server. Mutable: `peak_bytes`, the sum over its processes, grows while it
    serves."""

    url: str
    peak_bytes: int = 0


@contextlib.contextmanager
def local_server(variant: Variant, model: str | None) -> Iterator[LocalServer]:
    """Start a server on a free port and warm it up; end it on exit.

    Raises ConfigError if it does not start.
    """
    flags = ["--log-level", "warning", *(["--model", model] if model else []), *variant.flags]
    environment = {**os.environ, **variant.environment}
    with running_server(*flags, environment=environment) as (url, process):
        server, done = LocalServer(url), threading.Event()
        threading.Thread(target=_watch, args=(process.pid, server, done), daemon=True).start()
        try:
            warm_up = workloads.random_requests(4, (64, 64), (8, 8), 1000, seed=2**31)
            run_sharded(Target(url=url), warm_up.sessions, concurrency=2, processes=1)
            yield server
        finally:
            done.set()


def _watch(pid: int, server: LocalServer, done: threading.Event) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):  # a process has ended, so measuring ends, too
        tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        while not done.wait(MEMORY_EVERY_S):
            server.peak_bytes = max(
                server.peak_bytes, sum(process.memory_info().rss for process in tree)
            )


def radix(args: argparse.Namespace, seed: int) -> Workload:
    if args.trace is None:
        raise ConfigError("ablation radix replays a trace: say --trace FILE")
    return workloads.trace(
        args.trace,
        vocab_size=1000,
        scale=args.scale,
        max_len=args.max_len,
        speed=args.speed,
        start=args.start,
        count=args.requests,
        seed=seed,
    )


def chunk(args: argparse.Namespace, seed: int) -> Workload:
    """Long answers from the start; then a long prompt with a short answer every 0.5 s."""
    length = args.max_len * 3 // 4
    answers = workloads.random_requests(
        NUM_BACKGROUND, (16, 16), (length, length), 1000, seed
    ).arriving([0.0] * NUM_BACKGROUND)
    prompts = workloads.random_requests(
        NUM_PROMPTS, (length, length), (2, 2), 1000, seed + 1000
    ).arriving([0.5 + 0.5 * index for index in range(NUM_PROMPTS)])
    notes = {
        "kind": "long prompts among running streams",
        "streams": NUM_BACKGROUND,
        "prompts": NUM_PROMPTS,
        "tokens_each": length,
        "seed": seed,
    }
    return Workload(sessions=[*answers.sessions, *prompts.sessions], notes=notes)


def overlap(args: argparse.Namespace, seed: int) -> Workload:
    work = workloads.random_requests(32, (32, 32), (args.max_len // 8,) * 2, 1000, seed)
    return work.arriving([0.0] * 32)


def graphs(args: argparse.Namespace, seed: int) -> Workload:
    """Decode, where a step is short and launches are many: needs a GPU."""
    return overlap(args, seed)


ABLATIONS = {"radix": radix, "chunk": chunk, "overlap": overlap, "graphs": graphs}

VARIANTS = {
    "radix": tuple(
        # Pages of 8: at the default scale a block of the trace is 8 tokens.
        Variant(name=name, flags=("--cache", name, "--page-size", "8"))
        for name in ("radix", "naive")
    ),
    "chunk": tuple(
        Variant(name=str(size), flags=("--max-prefill-length", str(size)))
        for size in (32, 128, 512, 2048)
    ),
    "overlap": (
        Variant(name="overlap"),
        Variant(
            name="no overlap", environment={"MINISGL_DISABLE_OVERLAP_SCHEDULING": "1"}
        ),
    ),
    "graphs": (
        Variant(name="graphs", flags=("--device", "cuda")),
        Variant(name="no graphs", flags=("--device", "cuda", "--cuda-graph-max-bs", "0")),
    ),
}  # fmt: skip


def run_variant(
    name: str, variant: Variant, args: argparse.Namespace, seed: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The notes of the workload, and one run's numbers."""
    work = ABLATIONS[name](args, seed)
    load = machine_load()
    with local_server(variant, args.model) as server:
        records, cpu_s = run_sharded(
            Target(url=server.url), work.sessions, concurrency=None, processes=1
        )
        peak_mib = round(server.peak_bytes / 2**20, 1)
        time.sleep(REPORT_S)
        device_bytes = scrape(server.url)['minisgl_peak_memory_bytes{rank="0"}']
    if name == "chunk":
        streams = [record for record in records if record.session < NUM_BACKGROUND]
        prompts = [record for record in records if record.session >= NUM_BACKGROUND]
        run = summarize(streams, Slo())
        # TTFT of the prompts; everything else is measured on the streams that they disturb.
        run["summary"]["ttft_ms"] = summarize(prompts, Slo())["summary"]["ttft_ms"]
    else:
        run = summarize(records, Slo())
    # Resident memory of all processes; peak memory of the engine's device, on a CPU a part of it.
    run["summary"]["peak_memory_mib"] = peak_mib
    run["summary"]["peak_device_memory_mib"] = round(device_bytes / 2**20, 1)
    run |= {"client": {"cpu_s": cpu_s}, "load_before": load}
    if run["errors"]:
        Console().print(f"{variant.name}: {run['errors']}", style="red", markup=False)
    return work.notes, run


def main(argv: list[str]) -> int:
    parser = benchmark_parser(__name__, __doc__)
    parser.add_argument("name", choices=ABLATIONS, help="the mechanism")
    parser.add_argument("--model", help="a checkpoint (default: the built-in model)")
    parser.add_argument("--rounds", type=natural, default=3, help="rounds of all variants")
    parser.add_argument("--max-len", type=integer(MIN_CONTEXT), default=2048, help="the context")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="radix: the trace")
    parser.add_argument(
        "--scale", type=above_zero, default=1 / 64, help="radix: factor of all lengths"
    )
    parser.add_argument(
        "--speed", type=above_zero, default=16.0, help="radix: how much faster requests come"
    )
    parser.add_argument("--start", type=integer(0), default=0, help="radix: first request")
    parser.add_argument("--requests", type=natural, default=1000, help="radix: how many")
    add_json(parser)
    args = parser.parse_args(argv)
    variants = VARIANTS[args.name]
    runs: dict[str, list[dict[str, Any]]] = {variant.name: [] for variant in variants}
    notes: dict[str, Any] = {}
    result: dict[str, Any] = {"kind": "ablation", "ablation": args.name}
    try:
        if args.name == "overlap":
            result["simulated"] = [
                {"name": f"{count} running", **measure_overlap(count, device_s=0.002, steps=300)}
                for count in (1, 64, 256)
            ]
        for seed in range(args.rounds):
            for variant in variants if seed % 2 == 0 else variants[::-1]:
                notes, run = run_variant(args.name, variant, args, seed)
                runs[variant.name].append(run)
                summary = run["summary"]
                print(
                    f"round {seed + 1}, {variant.name}: TTFT p50 {summary['ttft_ms']['p50']:.1f} "
                    f"p99 {summary['ttft_ms']['p99']:.1f} ms, ITL p50 "
                    f"{summary['itl_ms']['p50']:.2f} p99 {summary['itl_ms']['p99']:.2f} ms, "
                    f"largest {summary['largest_itl_ms']['p50']:.1f} ms, "
                    f"{summary['output_tokens_per_s']:.0f} tokens/s, "
                    f"cached {summary['cached_share'] or 0:.1%}, "
                    f"memory {summary['peak_memory_mib']:.0f} MiB, device "
                    f"{summary['peak_device_memory_mib']:.0f} MiB",
                    flush=True,
                )
    except ConfigError as error:
        Console(stderr=True).print(str(error), style="red", markup=False)
        return 2
    result |= {"workload": notes, "model": args.model or "built-in", "variants": [
        {"name": name, "runs": done} for name, done in runs.items()
    ]}  # fmt: skip
    if args.json:
        write_json(args.json, result)
    return 0
