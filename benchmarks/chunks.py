"""What prefill chunks of several sizes do to latency: the real scheduler, in simulated time.

The loop is the real one, too. The device has a known speed: a step takes `--step-ms`, `--row-us`
for each decoding row, `--kv-ns` for each token of their contexts, and its prompt tokens at
`--rate`. The host takes `--host-ms` to
plan and settle any step, `--replay-ms` to launch one of decode rows alone, and `--launch-ms` one
with prompts. Requests arrive at once, or each at a time of its own within `--spread-ms`, in
`--draws` ways; what is printed are the medians of the draws. Nothing sleeps, so the same flags
print the same numbers. Defaults: about Qwen3-0.6B on an H200.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from minisgl.benchmark.arguments import (
    above_zero,
    add_json,
    benchmark_parser,
    from_zero,
    natural,
    naturals,
)
from minisgl.benchmark.lengths import lengths_of
from minisgl.benchmark.report import write_json
from minisgl.core import Event, Plan, SamplingParams
from minisgl.core.event import Token
from minisgl.core.executor import Flight
from minisgl.core.plan import StepResult
from minisgl.errors import ConfigError
from minisgl.message import ExitMsg, SchedulerMsg, UserMsg, ids_to_bytes
from minisgl.scheduler import Scheduler, SchedulerConfig, run

PAGE_SIZE, NUM_PAGES = 16, 100_000
VOCAB_SIZE = 150_000
WORKLOADS = ("throughput", "streams", "mixed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Seconds, and tokens a second."""

    step_s: float
    row_s: float
    kv_s: float
    rate: float
    host_s: float
    replay_s: float
    launch_s: float

    def device_s(self, plan: Plan) -> float:
        rows, prompt = plan.num_decodes, plan.num_tokens - plan.num_decodes
        decode_s = self.row_s * rows + self.kv_s * sum(plan.ends[:rows]) if rows else 0.0
        return self.step_s + decode_s + prompt / self.rate

    def launching_s(self, plan: Plan) -> float:
        has_prompts = plan.num_tokens > plan.num_decodes
        return self.host_s + (self.launch_s if has_prompts else self.replay_s)


class Simulation:
    """Executor and outbox in one. Mutable: the host's time and when the device will be free."""

    def __init__(self, speed: Speed) -> None:
        self._speed = speed
        self.now = self._free_at = 0.0
        self.num_prompt_steps = 0
        self.times: dict[int, list[float]] = defaultdict(list)

    def launch(self, plan: Plan) -> _Flight:
        self.num_prompt_steps += plan.num_tokens > plan.num_decodes
        self.now += self._speed.launching_s(plan)
        self._free_at = max(self.now, self._free_at) + self._speed.device_s(plan)
        return _Flight(self, self._free_at, StepResult(next_ids=[1] * len(plan.sample_rows)))

    def send(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Token):
                self.times[event.uid].append(self.now)

    def pong(self, seq: int) -> None:
        raise AssertionError("nobody pings")


class _Arrivals:
    """An inbox: messages of a time that has come. An idle loop's time is the next one's."""

    def __init__(self, messages: list[tuple[float, UserMsg]], simulation: Simulation) -> None:
        self._messages = sorted(messages, key=lambda message: message[0])
        self._simulation = simulation

    def take(self, timeout_s: float) -> Sequence[SchedulerMsg]:
        if timeout_s:
            if not self._messages:
                return [ExitMsg()]
            self._simulation.now = max(self._simulation.now, self._messages[0][0])
        here = [message for at, message in self._messages if at <= self._simulation.now]
        del self._messages[: len(here)]
        return here


@dataclass(frozen=True, slots=True)
class _Flight(Flight):
    simulation: Simulation
    ready_at: float
    outcome: StepResult

    def wait(self) -> StepResult:
        self.simulation.now = max(self.simulation.now, self.ready_at)
        return self.outcome


def main(argv: Sequence[str]) -> int:
    parser = benchmark_parser(__name__, __doc__)
    add = parser.add_argument
    add("--chunks", type=naturals, default="1024,2048,4096,8192", help="prompt tokens of a step")
    add("--workloads", default=",".join(WORKLOADS), help="with commas")
    add("--rate", type=above_zero, default=400_000.0, help="prompt tokens a second")
    for name, default, what in (
        ("--step-ms", 1.0, "any step of the device"),
        ("--row-us", 4.0, "a decoding row"),
        ("--kv-ns", 26.0, "a token of its context"),
        ("--host-ms", 0.3, "planning and settling a step"),
        ("--replay-ms", 0.4, "launching one of decode rows alone"),
        ("--launch-ms", 1.0, "launching one with prompts; without graphs 7 to 15"),
    ):
        add(name, type=above_zero, default=default, help=what)
    add("--spread-ms", type=from_zero, default=0.0, help="within which requests arrive; 0: at once")
    add("--draws", type=natural, default=1, help="of the times at which they arrive")
    add_json(parser)
    args = parser.parse_args(argv)
    speed = Speed(
        step_s=args.step_ms / 1e3,
        row_s=args.row_us / 1e6,
        kv_s=args.kv_ns / 1e9,
        rate=args.rate,
        host_s=args.host_ms / 1e3,
        replay_s=args.replay_ms / 1e3,
        launch_s=args.launch_ms / 1e3,
    )
    rows = [
        simulate(workload, chunk, speed, args.spread_ms / 1e3, args.draws)
        for workload in _workloads(args.workloads)
        for chunk in args.chunks
    ]
    for row in rows:
        print(
            f"{row['name']:<20} {row['seconds']:6.2f} s, {row['prompt_steps']:3.0f} of "
            f"{row['steps']:5.0f} steps with prompts; TTFT p50/p99 "
            + "/".join(f"{value:.0f}" for value in row["ttft_ms"])
            + " ms; ITL p50/p99/max "
            + "/".join(f"{value:.1f}" for value in row["itl_ms"])
            + " ms"
            + (f", p99 {row['itl_p99_unlucky_ms']:.1f} in bad luck" if args.draws > 1 else "")
        )
    if args.json:
        write_json(args.json, {"rows": rows})
    return 0


def _workloads(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in WORKLOADS]:
        raise ConfigError(f"there is no workload {unknown[0]!r}; there are: {', '.join(WORKLOADS)}")
    return names


def simulate(
    workload: str, chunk: int, speed: Speed, spread_s: float = 0.0, draws: int = 1
) -> dict[str, Any]:
    """All requests of the workload within `spread_s`; medians of so many draws of their times.

    ttft_ms, from the request's arrival: p50 and p99; itl_ms: p50, p99, largest;
    itl_p99_unlucky_ms: that of one draw in ten is above it.
    """
    rows = [_simulate(workload, chunk, speed, spread_s, seed) for seed in range(draws)]
    medians = {key: np.median([row[key] for row in rows], axis=0) for key in rows[0]}
    unlucky_ms = np.percentile([row["itl_ms"][1] for row in rows], 90)
    return {
        "name": f"{workload} {chunk:,}",
        **{key: np.round(median, 3).tolist() for key, median in medians.items()},
        "itl_p99_unlucky_ms": round(float(unlucky_ms), 3),
    }


def _simulate(
    workload: str, chunk: int, speed: Speed, spread_s: float, seed: int
) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    messages = [
        UserMsg(
            uid=uid,
            ids=ids_to_bytes(rng.integers(2, VOCAB_SIZE, prompt).astype(np.int32)),
            sampling=SamplingParams(max_tokens=output, ignore_eos=True),
        )
        for uid, (prompt, output) in enumerate(lengths_of(workload))
    ]
    arrivals = rng.uniform(0, spread_s, len(messages)) if spread_s else np.zeros(len(messages))
    simulation = Simulation(speed)
    scheduler = Scheduler(
        SchedulerConfig(
            num_pages=NUM_PAGES,
            page_size=PAGE_SIZE,
            max_seq_len=40_960,
            vocab_size=VOCAB_SIZE,
            eos_ids=frozenset(),
            max_prefill_tokens=chunk,
        ),
        clock=lambda: simulation.now,
    )
    inbox = _Arrivals(list(zip(arrivals.tolist(), messages, strict=True)), simulation)
    run(scheduler, simulation, inbox, simulation)
    assert scheduler.stats.num_finished == len(messages)
    times = simulation.times
    first = np.array([own[0] - arrivals[uid] for uid, own in times.items()]) * 1e3
    gaps = np.concatenate([np.diff(own) for own in times.values()]) * 1e3
    return {
        "seconds": simulation.now,
        "steps": scheduler.stats.num_steps,
        "prompt_steps": simulation.num_prompt_steps,
        "ttft_ms": np.percentile(first, (50, 99)),
        "itl_ms": np.percentile(gaps, (50, 99, 100)),
    }
