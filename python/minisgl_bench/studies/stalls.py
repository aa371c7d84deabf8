"""Gaps between tokens, TTFT and throughput by stall bound, in simulated time.

The scheduler and its loop are the real ones. The device is a model of a GPU's speed, the same
`StepTimes` that the scheduler plans with: a step with prompts takes as long as reading the weights
(`--step-ms`) or longer, by `--rate`; a decode step takes `--step-ms`, `--row-us` per row and
`--kv-ns` per token of the rows' contexts. The host takes `--host-ms` to plan and settle a step and
to launch it. Nothing sleeps, so the same flags print the same numbers. Defaults: about Qwen3-32B on
two H200s.

Workloads: those of `minisgl_bench.lengths`, which arrive within `--spread-ms`, and `trace`, the
Mooncake file of `--trace` with its lengths times `--scale`, its arrivals `--speed` times as fast.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from minisgl.core import Event, Plan, SamplingParams
from minisgl.core.event import Token
from minisgl.core.executor import Flight
from minisgl.core.plan import StepResult
from minisgl.core.step_times import StepTimes
from minisgl.errors import ConfigError
from minisgl.message import ExitMsg, SchedulerMsg, UserMsg, ids_to_bytes
from minisgl.scheduler import Scheduler, SchedulerConfig, run
from minisgl_bench import workload as workloads
from minisgl_bench.arguments import (
    above_zero,
    add_json,
    benchmark_parser,
    from_zero,
    natural,
)
from minisgl_bench.lengths import lengths_of
from minisgl_bench.report import write_json

PAGE_SIZE, NUM_PAGES = 16, 60_000
VOCAB_SIZE = 150_000
MAX_SEQ_LEN = 131_072
BEST_CHUNK = 8192  # a GPU's
SIZES = (64, 256, 512, 1024, 2048, 4096, 8192)
WORKLOADS = ("trace", "streams", "mixed")  # by default


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """times: the device's. host_s: the host's seconds for planning, launching and settling a
    step."""

    times: StepTimes
    host_s: float

    def decode_s(self, plan: Plan) -> float:
        """Return the seconds of the decode rows alone."""
        rows = plan.num_decodes
        return self.times.step_s(rows, sum(plan.ends[:rows])) if rows else 0.0


@dataclass(frozen=True, slots=True)
class Arrival:
    at_s: float
    message: UserMsg


class Simulation:
    """Executor and outbox in one. Mutable: the host's time and when the device will be free."""

    def __init__(self, speed: Speed) -> None:
        self._speed = speed
        self.now = self._free_at = 0.0
        self.num_prompt_steps = 0
        self.times: dict[int, list[float]] = defaultdict(list)
        self.decode_s: dict[int, list[float]] = defaultdict(
            list
        )  # of the steps that gave the tokens
        self._settled_decode_s = 0.0

    def launch(self, plan: Plan) -> _Flight:
        self.num_prompt_steps += plan.num_tokens > plan.num_decodes
        self.now += self._speed.host_s
        self._free_at = max(self.now, self._free_at) + self._speed.times.plan_s(plan)
        outcome = StepResult(next_ids=[1] * len(plan.sample_rows))
        return _Flight(self, self._free_at, self._speed.decode_s(plan), outcome)

    def settle(self, ready_at: float, decode_s: float) -> None:
        self.now = max(self.now, ready_at)
        self._settled_decode_s = decode_s

    def send(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Token):
                self.times[event.uid].append(self.now)
                self.decode_s[event.uid].append(self._settled_decode_s)

    def pong(self, seq: int) -> None:
        raise AssertionError("a simulation has no pings")


@dataclass(frozen=True, slots=True)
class _Flight(Flight):
    simulation: Simulation
    ready_at: float
    decode_s: float
    outcome: StepResult

    def wait(self) -> StepResult:
        self.simulation.settle(self.ready_at, self.decode_s)
        return self.outcome


class _Inbox:
    """Returns the messages that have arrived. An idle loop's clock goes on to the next arrival."""

    def __init__(self, arrivals: Sequence[Arrival], simulation: Simulation) -> None:
        self._arrivals = sorted(arrivals, key=lambda arrival: arrival.at_s)
        self._simulation = simulation

    def take(self, timeout_s: float) -> Sequence[SchedulerMsg]:
        if timeout_s:
            if not self._arrivals:
                return [ExitMsg()]
            self._simulation.now = max(self._simulation.now, self._arrivals[0].at_s)
        here = [arrival for arrival in self._arrivals if arrival.at_s <= self._simulation.now]
        del self._arrivals[: len(here)]
        return [arrival.message for arrival in here]


def main(argv: Sequence[str]) -> int:
    parser = benchmark_parser(__name__, __doc__)
    add = parser.add_argument
    add("--bounds", type=_bounds, default="default,20,80", help="ms, none or default, with commas")
    add("--workloads", default=",".join(WORKLOADS), help="with commas")
    add("--rate", type=above_zero, default=17_000.0, help="prompt tokens a second")
    for name, default, what in (
        ("--step-ms", 10.0, "reading the weights: any step of the device"),
        ("--row-us", 30.0, "a decode row"),
        ("--kv-ns", 2.0, "a token of its context"),
        ("--attend-ns", 2.0, "a pair of a prompt token and a token before its chunk"),
        ("--host-ms", 0.7, "planning, launching and settling a step"),
    ):
        add(name, type=above_zero, default=default, help=what)
    add("--spread-ms", type=from_zero, default=60.0, help="span of the arrivals; 0: at once")
    add("--trace", metavar="FILE", help="the file of the workload trace")
    add("--count", type=natural, default=400, help="requests of the trace")
    add("--scale", type=above_zero, default=0.25, help="trace: factor of all lengths")
    add("--speed", type=above_zero, default=1.0, help="trace: how much faster requests come")
    add_json(parser)
    args = parser.parse_args(argv)
    speed = Speed(
        times=times_of(
            rate=args.rate,
            step_ms=args.step_ms,
            row_us=args.row_us,
            kv_ns=args.kv_ns,
            attend_ns=args.attend_ns,
        ),
        host_s=args.host_ms / 1e3,
    )
    work = {}
    for name in args.workloads.split(","):  # all of them, before any is run
        if name != "trace":
            work[name] = spread_arrivals(name, args.spread_ms / 1e3)
        elif args.trace is None:
            raise ConfigError("the workload trace needs --trace FILE")
        else:
            work[name] = trace_arrivals(Path(args.trace), args.count, args.scale, args.speed)
    rows = []
    for name, arrivals in work.items():
        for bound in args.bounds:
            label = f"{name} x{args.speed:g}" if name == "trace" else name
            rows.append(simulate(label, arrivals, speed, bound))
            print(describe(rows[-1]), flush=True)
    if args.json:
        write_json(args.json, {"rows": rows})
    return 0


def _bounds(text: str) -> list[float | str | None]:
    def bound(part: str) -> float | str | None:
        if part in ("default", "none"):
            return None if part == "none" else part
        return above_zero(part)

    return [bound(part) for part in text.split(",")]


def times_of(
    *, rate: float, step_ms: float, row_us: float, kv_ns: float, attend_ns: float
) -> StepTimes:
    """Return the times of a device that reads its weights in `step_ms`.

    A step with prompts takes a fifth of that on top of its GEMMs.
    """
    return StepTimes(
        prompt_us=tuple(
            (size, max(step_ms * 1e3, step_ms * 200 + size / rate * 1e6)) for size in SIZES
        ),
        decode_us=step_ms * 1e3,
        row_us=row_us,
        context_ns=kv_ns,
        attend_ns=attend_ns,
    )


def spread_arrivals(workload: str, spread_s: float, seed: int = 0) -> list[Arrival]:
    """Return the requests of a fixed workload, each at a random time within `spread_s`."""
    rng = np.random.default_rng(seed)
    return [
        Arrival(
            float(rng.uniform(0, spread_s)) if spread_s else 0.0,
            UserMsg(
                uid=uid,
                ids=ids_to_bytes(rng.integers(2, VOCAB_SIZE, prompt).astype(np.int32)),
                sampling=SamplingParams(max_tokens=output, ignore_eos=True),
            ),
        )
        for uid, (prompt, output) in enumerate(lengths_of(workload))
    ]


def trace_arrivals(path: Path, count: int, scale: float, speed: float) -> list[Arrival]:
    """Return the first `count` requests of a trace."""
    trace = workloads.trace(
        path, vocab_size=VOCAB_SIZE, scale=scale, max_len=MAX_SEQ_LEN, speed=speed, count=count
    )
    return [
        Arrival(
            session.at_s or 0.0,
            UserMsg(
                uid=uid,
                ids=ids_to_bytes(session.turns[0].ids),
                sampling=SamplingParams(max_tokens=session.turns[0].max_tokens, ignore_eos=True),
            ),
        )
        for uid, session in enumerate(trace.sessions)
    ]


def simulate(
    name: str, arrivals: Sequence[Arrival], speed: Speed, bound: float | str | None
) -> dict[str, Any]:
    """Run the workload with a stall bound in ms: None for none, "default" for the server's.

    Returns, in ms: ttft p50 and p99 from the request's arrival; itl p50, p99 and the longest.
    share_above: the share of gaps that are longer than the bound and one decode step.
    """
    stall_s = speed.times.default_stall_s if bound == "default" else None
    if isinstance(bound, float | int):
        stall_s = bound / 1e3
    simulation = Simulation(speed)
    scheduler = Scheduler(scheduler_config(speed, stall_s), clock=lambda: simulation.now)
    run(scheduler, simulation, _Inbox(arrivals, simulation), simulation)
    assert scheduler.stats.num_finished == len(arrivals)
    at = {arrival.message.uid: arrival.at_s for arrival in arrivals}
    times = simulation.times
    first_ms = np.array([own[0] - at[uid] for uid, own in times.items()]) * 1e3
    gaps_ms = np.concatenate([np.diff(own) for own in times.values()]) * 1e3
    decode_ms = np.concatenate([own[1:] for own in simulation.decode_s.values()]) * 1e3
    limit_ms = (stall_s or math.inf) * 1e3 + decode_ms + speed.host_s * 1e3
    stats = scheduler.stats
    shown = "no bound" if stall_s is None else f"{stall_s * 1e3:.1f} ms"
    return {
        "name": f"{name}, {shown}",
        "bound_ms": None if stall_s is None else round(stall_s * 1e3, 1),
        "is_default": bound == "default",
        "seconds": round(simulation.now, 3),
        "tokens_per_s": round((stats.num_prompt_tokens + stats.num_output_tokens) / simulation.now),
        "steps": stats.num_steps,
        "prompt_steps": simulation.num_prompt_steps,
        "cached_share": round(stats.num_cached_tokens / stats.num_prompt_tokens, 4),
        "retractions": stats.num_retractions,
        "ttft_ms": np.round(np.percentile(first_ms, (50, 99)), 1).tolist(),
        "itl_ms": np.round(np.percentile(gaps_ms, (50, 99, 100)), 1).tolist(),
        "share_above": round(float(np.mean(gaps_ms > limit_ms + 1e-6)), 6),
    }


def scheduler_config(speed: Speed, stall_s: float | None) -> SchedulerConfig:
    return SchedulerConfig(
        num_pages=NUM_PAGES,
        page_size=PAGE_SIZE,
        max_seq_len=MAX_SEQ_LEN,
        vocab_size=VOCAB_SIZE,
        eos_ids=frozenset(),
        max_prefill_tokens=BEST_CHUNK,
        max_stall_s=stall_s,
        step_times=speed.times,
    )


def describe(row: dict[str, Any]) -> str:
    name = row["name"] + (" (default)" if row["is_default"] else "")
    return (
        f"{name:<32} {row['seconds']:8.2f} s, {row['tokens_per_s']:,} tokens/s; "
        "TTFT p50/p99 " + "/".join(f"{value:.0f}" for value in row["ttft_ms"]) + " ms; "
        "ITL p50/p99/max " + "/".join(f"{value:.1f}" for value in row["itl_ms"]) + " ms; "
        f"{100 * row['share_above']:.3f} % above the bound"
    )
