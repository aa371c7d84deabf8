"""Measures any OpenAI-compatible server: latency per token, throughput, goodput under an SLO.

Arrivals: `--rate` (open-loop Poisson), a trace's own times, `--concurrency` (closed loop), or all
at once; `--sweep` raises the rate until the goodput breaks. `--repeat` runs again with new prompts
of the same lengths (a prefix cache would answer the old ones), which shows the noise.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from minisgl.benchmark.client import Target
from minisgl.errors import ConfigError
from minisgl.server.flags import integer
from minisgl_bench import workload as workloads
from minisgl_bench.arguments import (
    above_zero,
    add_json,
    add_word,
    benchmark_parser,
    from_zero,
    json_object,
    natural,
    take_word,
)
from minisgl_bench.counters import describe_server, difference, scrape
from minisgl_bench.report import machine_load, write_json
from minisgl_bench.shards import run_sharded
from minisgl_bench.summary import Slo, summarize
from minisgl_bench.workload import Workload
from minisgl_gateway.http import server_root

GOODPUT_SHARE = 0.9  # a rate is carried when this share of its requests meets the SLO
SWEEP_STEPS = 12  # doublings and bisections of `--sweep auto` at most
CLIENT_BUSY = 0.8  # of a core: above it the client's own time may show in the numbers


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = benchmark_parser(__name__, __doc__)
    add = parser.add_argument
    url = "http://127.0.0.1:1919"
    add("--url", type=server_root, default=url, help="the server")
    add("--model", help="its name of the model (default: the first of /v1/models)")
    add(
        "--api",
        choices=("completions", "chat", "generate"),
        default="completions",
        help="the endpoint",
    )
    add("--text", action="store_true", help="prompts as text instead of token ids")
    add(
        "--api-key-env",
        type=_variable,
        metavar="NAME",
        help="environment variable that holds the API key",
    )
    add("--extra", type=json_object, default={}, metavar="JSON", help="more fields for each body")
    add("--allow-eos", action="store_true", help="do not send ignore_eos: answers may be shorter")

    group = parser.add_argument_group("workload")
    add = group.add_argument
    kinds = ("random", "shared-prefix", "multi-turn", "trace")
    add("--workload", choices=kinds, default="random", help="kind of requests")
    add("--requests", type=natural, default=256, help="requests, or conversations")
    add("--input", type=token_span, default=(100, 1024), metavar="LOW:HIGH", help="prompt tokens")
    add("--output", type=token_span, default=(100, 1024), metavar="LOW:HIGH", help="answer tokens")
    add(
        "--vocab-size",
        type=integer(workloads.FIRST_ID + 1, 2**31 - 1),
        default=1000,
        help="ids are drawn below this",
    )
    add("--seed", type=integer(0), default=0, help="seed of prompts, lengths and arrivals")
    add("--groups", type=natural, default=8, help="shared-prefix: different prefixes")
    add("--prefix", type=natural, default=512, help="shared-prefix: tokens of each")
    add("--turns", type=natural, default=4, help="multi-turn: turns of each")
    add("--think", type=from_zero, default=0.0, help="multi-turn: seconds between turns")
    add("--trace", type=Path, metavar="FILE", help="trace: Mooncake or Qwen-Bailian JSON lines")
    add("--start", type=integer(0), default=0, help="trace: first request")
    add("--scale", type=above_zero, default=1.0, help="trace: factor of all lengths")
    add("--max-len", type=integer(2), help="trace: prompt and answer at most, after scaling")
    add("--speed", type=above_zero, default=1.0, help="trace: how much faster requests come")

    group = parser.add_argument_group("load")
    add = group.add_argument
    add("--rate", type=above_zero, help="sessions a second, Poisson")
    add("--concurrency", type=natural, help="sessions at once, closed loop")
    add("--sweep", type=_rates, metavar="auto|R,R,...", help="rates to try; auto finds the limit")
    add("--slo", type=_slo, default=Slo(), help="bounds in ms: ttft=500,tpot=50; also itl, e2e")
    add("--repeat", type=natural, default=1, help="runs with new prompts")
    add("--client-processes", type=natural, default=1, help="processes of this client")
    add("--timeout", type=above_zero, default=600.0, help="seconds without news that end a request")
    add_json(parser)
    add_word(parser, "--model")
    args = parser.parse_args(argv)
    take_word(parser, args, "--model")
    if (args.workload == "trace") != (args.trace is not None):
        parser.error("--workload trace and --trace FILE go together")
    if sum(value is not None for value in (args.rate, args.concurrency, args.sweep)) > 1:
        parser.error("give one of --rate, --concurrency and --sweep")
    if args.sweep is not None and args.repeat > 1:
        parser.error("--repeat does not go with --sweep, whose runs are its rates")
    return args


def main(argv: list[str]) -> int:
    args = parse_args(argv)
    load = machine_load()
    api_key = os.environ.get(args.api_key_env) if args.api_key_env else None
    try:
        server = describe_server(args.url, api_key)
        target = Target(
            url=args.url,
            model=args.model or server["model"],
            api=args.api,
            text=args.text,
            ignore_eos=not args.allow_eos,
            api_key=api_key,
            timeout_s=args.timeout,
            extra=args.extra,
        )
        before = scrape(args.url, api_key)
        shown = {name: value for name, value in asdict(target).items() if name != "api_key"}
        result: dict[str, Any] = {"kind": "online", "target": shown, "server": server}
        result |= {"slo": asdict(args.slo), "load_before": load}
        if args.sweep is not None:
            result |= {"kind": "sweep", **sweep(target, args)}
        else:
            result["runs"] = [run_once(target, args, run) for run in range(args.repeat)]
        result["server_counters"] = difference(before, scrape(args.url, api_key))
    except ConfigError as error:
        Console(stderr=True).print(str(error), style="red", markup=False)
        return 2
    if args.json:
        write_json(args.json, result)
    failed = [run for run in result.get("runs", []) if run["summary"]["num_failed"]]
    return 1 if failed else 0


def make_workload(args: argparse.Namespace, run: int) -> Workload:
    """Return the workload of a run. Its seed is new: other prompts, and other random lengths."""
    seed, vocab_size = args.seed + run, args.vocab_size
    if args.workload == "random":
        return workloads.random_requests(args.requests, args.input, args.output, vocab_size, seed)
    if args.workload == "shared-prefix":
        return workloads.shared_prefix(
            args.requests, args.groups, args.prefix, args.input, args.output, vocab_size, seed
        )
    if args.workload == "multi-turn":
        return workloads.multi_turn(
            args.requests, args.turns, args.input, args.output, args.think, vocab_size, seed
        )
    return workloads.trace(
        args.trace,
        vocab_size=vocab_size,
        scale=args.scale,
        max_len=args.max_len,
        speed=args.speed,
        start=args.start,
        count=args.requests,
        seed=seed,
    )


def run_once(
    target: Target, args: argparse.Namespace, run: int, rate: float | None = None
) -> dict[str, Any]:
    """Run the workload once and print the result. Returns it: `summarize` with notes."""
    work = make_workload(args, run)
    count, rate = len(work.sessions), rate or args.rate
    concurrency = args.concurrency
    if rate is not None:
        work = work.arriving(workloads.poisson_times(count, rate, args.seed + run))
        arrivals: dict[str, Any] = {"arrivals": "poisson", "rate": rate}
    elif concurrency is not None:
        arrivals = {"arrivals": "closed loop", "concurrency": concurrency}
    elif work.sessions[0].at_s is not None:
        arrivals = {"arrivals": "trace"}
    else:
        work, arrivals = work.arriving([0.0] * count), {"arrivals": "all at once"}
    num_turns = sum(len(session.turns) for session in work.sessions)
    with _bar(num_turns) as bar:
        records, cpu_s = run_sharded(
            target,
            work.sessions,
            concurrency=concurrency,
            processes=args.client_processes,
            on_progress=bar,
        )
    result: dict[str, Any] = {
        "workload": {**work.notes, **arrivals, "sessions": count},
        **summarize(records, args.slo),
    }
    summary = result["summary"]
    busiest = max(cpu_s) / max(summary["duration_s"], 1e-3)
    result["client"] = {
        "processes": len(cpu_s),
        "busiest_share": round(busiest, 3),
        "tokens_per_core_s": round(summary["num_output_tokens"] / sum(cpu_s)),
    }
    if busiest > CLIENT_BUSY:
        result["client"]["warning"] = "a client process was busy: use more --client-processes"
    show(result)
    return result


def sweep(target: Target, args: argparse.Namespace) -> dict[str, Any]:
    """Run the workload at several rates. `auto` doubles the rate from 1 until it fails twice, then
    bisects."""
    points: list[dict[str, Any]] = []

    def carried(rate: float) -> bool:
        points.append({"rate": rate, **run_once(target, args, len(points), rate)})
        return bool(points[-1]["summary"]["goodput_share"] >= GOODPUT_SHARE)

    rates, low, high, step = list(args.sweep), 0.0, 0.0, 0
    for rate in rates:
        low = max(low, rate) if carried(rate) else low
    while not rates and step < SWEEP_STEPS and (not high or high / max(low, 1e-9) > 1.2):
        rate = (low + high) / 2 if high else max(2 * low, 1.0)
        if carried(rate) or carried(rate):  # a single failure on a shared machine is no limit
            low = rate
        else:
            high = rate
        step += 1
        if rate < 0.05:
            break
    points.sort(key=lambda point: float(point["rate"]))
    Console().print(
        f"highest rate with {GOODPUT_SHARE:.0%} of requests in the SLO: {low:g} a second"
    )
    return {"points": points, "summary": {"max_rate_per_s": low}, "carried_share": GOODPUT_SHARE}


# --- for people --------------------------------------------------------------------------------


def show(result: dict[str, Any]) -> None:
    summary = result["summary"]
    table = Table()
    for column in ("ms", "mean", "p50", "p90", "p99", "max"):
        table.add_column(column, justify="right")
    labels = {
        "ttft_ms": "TTFT",
        "ttft_beyond_server_ms": "TTFT beyond the server's own",
        "itl_ms": "ITL",
        "largest_itl_ms": "largest ITL of a request",
        "tpot_ms": "TPOT",
        "e2e_ms": "end to end",
        "late_ms": "sent late",
    }
    for name, label in labels.items():
        values = summary[name]
        if values:
            table.add_row(label, *(f"{values[key]:,.2f}" for key in values))
    console = Console(highlight=False)
    console.print(", ".join(f"{name} {value}" for name, value in result["workload"].items()))
    console.print(table)
    console.print(
        f"{summary['num_requests']} requests ({summary['num_failed']} failed) in "
        f"{summary['duration_s']:.2f} s: {summary['requests_per_s']:.2f} requests/s, "
        f"{summary['output_tokens_per_s']:,.0f} output tokens/s, "
        f"{summary['total_tokens_per_s']:,.0f} tokens/s in and out, "
        f"goodput {summary['goodput_per_s']:.2f}/s ({summary['goodput_share']:.0%}), "
        f"cached {summary['cached_share'] or 0:.1%} of the prompts"
    )
    if counted := result["tokens_counted_by"]:
        console.print(
            "tokens counted by " + ", ".join(f"{how} ({count})" for how, count in counted.items())
        )
    for error, count in result["errors"].items():
        console.print(f"{count} x {error}", style="red", markup=False)
    if warning := result["client"].get("warning"):
        console.print(f"[yellow]{warning}")


@contextmanager
def _bar(num_requests: int) -> Iterator[Callable[[int, int], None]]:
    """Show a bar of ended requests and output tokens. Yields what adds to both."""
    columns = (
        *(TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()),
        TextColumn("{task.fields[tokens]:,} tokens"),
    )
    with Progress(*columns, transient=True) as progress:
        task = progress.add_task("", total=num_requests, tokens=0)

        def add(requests: int, tokens: int) -> None:
            progress.update(
                task, advance=requests, tokens=progress.tasks[0].fields["tokens"] + tokens
            )

        yield add


def token_span(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    try:
        span = (int(low), int(high or low))
    except ValueError:
        span = (0, 0)
    if not 1 <= span[0] <= span[1]:
        raise argparse.ArgumentTypeError(f"expected LOW:HIGH or one number of tokens, got {text!r}")
    return span


def _variable(text: str) -> str:
    if not os.environ.get(text):
        raise argparse.ArgumentTypeError(
            f"there is no environment variable {text!r}, or it is empty"
        )
    return text


def _rates(text: str) -> list[float]:
    """Parse rates; [] for auto."""
    try:
        return [] if text == "auto" else [above_zero(part) for part in text.split(",")]
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"expected auto or rates as 1,2,4, got {text!r}") from None


def _slo(text: str) -> Slo:
    try:
        return Slo.parse(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
