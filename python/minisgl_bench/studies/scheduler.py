"""The cost of scheduling: microseconds of a step by part, and of prefix-tree operations.

The loop is the real `run` with the real ZeroMQ inbox and outbox, so a step decodes and encodes the
messages of a server. The executor answers at once, so only host time is left; a part that the loop
sleeps in is not counted. A fixed Python loop is timed beside each case; the ratio to it compares
between machines.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from minisgl.core import Plan, SamplingParams
from minisgl.message import ExitMsg, UserMsg, ids_to_bytes
from minisgl.scheduler import Scheduler, SchedulerConfig, run
from minisgl.scheduler.io import Message, SourceInbox, ZmqOutbox
from minisgl.scheduler.loop import PARTS as LOOP_PARTS
from minisgl.scheduler.loop import Meter
from minisgl.server.flags import integer
from minisgl.utils.zmq import Endpoints, PullQueue, PushQueue
from minisgl_bench.arguments import add_json, benchmark_parser, natural
from minisgl_bench.fakes import InstantExecutor
from minisgl_bench.report import machine_load, write_json
from minisgl_bench.studies.prefix_tree import measure_tree

PARTS = ("receive", "plan", "launch", "commit", "send")  # an instant executor has no wait
PAGE_SIZE = 16
VOCAB_SIZE = 32_000
WARM_UP_STEPS = 20
CHUNK_TOKENS = 2048  # prompt tokens a step; all prompts here are whole chunks of a step


def main(argv: list[str]) -> int:
    parser = benchmark_parser(__name__, __doc__)
    parser.add_argument(
        "--running", type=natural, nargs="+", default=[1, 64, 256, 1024], help="requests"
    )
    parser.add_argument("--steps", type=integer(2), default=400, help="steps of each case")
    parser.add_argument("--rounds", type=natural, default=3, help="rounds of all cases")
    add_json(parser)
    args = parser.parse_args(argv)
    load = machine_load()
    cases = [(kind, count) for kind in ("decode", "mixed") for count in args.running]
    measured: dict[tuple[str, int], list[dict[str, float]]] = {case: [] for case in cases}
    for _ in range(
        args.rounds
    ):  # interleaved, so that a slow second of the machine affects every case
        for kind, count in cases:
            measured[kind, count].append(measure_steps(kind, count, args.steps))
    steps = [
        {"name": f"{kind} {count}", "kind": kind, "running": count, **_medians(rounds)}
        for (kind, count), rounds in measured.items()
    ]
    tree = [row for page_size in (1, PAGE_SIZE) for row in measure_tree(page_size)]
    _show(steps, tree)
    if args.json:
        result = {"kind": "scheduler", "load_before": load, "steps_each": args.steps}
        write_json(args.json, {**result, "steps": steps, "tree": tree})
    return 0


# --- steps -------------------------------------------------------------------------------------


class _Times(Meter):
    """Mutable: `steps` collects the nanoseconds of each part and of the whole turn. on_step: gets
    the number of requests that have ended, after each step, in time that is not counted."""

    def __init__(self, on_step: Callable[[int], None]) -> None:
        self._on_step = on_step
        self._spent = [0] * len(LOOP_PARTS)
        self._last = time.perf_counter_ns()
        self.steps: list[dict[str, int]] = []

    def begin(self, *, asleep: bool) -> None:
        if asleep:
            self._last = time.perf_counter_ns()

    def lap(self, part: int) -> None:
        now = time.perf_counter_ns()
        self._spent[part] += now - self._last
        self._last = now

    def settled(self, plan: Plan, scheduler: Scheduler) -> None:
        times = dict(zip(LOOP_PARTS, self._spent, strict=True))
        self.steps.append({**times, "total": sum(self._spent)})
        self._on_step(scheduler.stats.num_finished)
        self._spent = [0] * len(LOOP_PARTS)
        self._last = time.perf_counter_ns()


@contextmanager
def _sockets() -> Iterator[tuple[SourceInbox, ZmqOutbox, PushQueue]]:
    """Yield a scheduler's sockets, a sender to it, and a detokenizer that never reads."""
    with ExitStack() as stack:
        endpoints = Endpoints.create()
        stack.callback(endpoints.remove)
        sink: PullQueue[Any] = PullQueue(endpoints.detokenizer, Any)
        inbox, outbox = SourceInbox(PullQueue(endpoints.scheduler, Message)), ZmqOutbox(endpoints)
        client = PushQueue(endpoints.scheduler)
        for queue in (sink, inbox, outbox, client):
            stack.callback(queue.close)
        yield inbox, outbox, client


def drive(num_running: int, num_steps: int, *, mixed: bool) -> list[dict[str, int]]:
    """Run `num_steps` steps after all prompts are computed and the loop is warm, and return their
    nanoseconds.

    Prompts have 128 tokens. mixed: answers have 128, too, and each request that ends is replaced,
    so a step decodes and prefills; else no request ends.
    """
    config = SchedulerConfig(
        num_pages=num_running * 256,
        page_size=PAGE_SIZE,
        max_seq_len=4096,
        vocab_size=VOCAB_SIZE,
        eos_ids=frozenset(),
        max_prefill_tokens=CHUNK_TOKENS,
        max_running=num_running,
    )
    first = WARM_UP_STEPS + num_running * 128 // CHUNK_TOKENS + (128 if mixed else 0)
    rng = np.random.default_rng(0)
    uids = itertools.count()

    def request() -> UserMsg:
        uid = next(uids)
        # The first requests end spread over 128 steps, so that no step ends all of them.
        length = min(1 + uid * 128 // num_running, 128) if mixed else first + num_steps + 100
        return UserMsg(
            uid=uid,
            ids=ids_to_bytes(rng.integers(0, VOCAB_SIZE, 128, dtype=np.int32)),
            sampling=SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True),
        )

    with _sockets() as (inbox, outbox, client):
        num_asked = num_running

        def on_step(num_ended: int) -> None:
            nonlocal num_asked
            if mixed:
                missing = num_running + num_ended - num_asked
                client.put([request() for _ in range(missing)])
                num_asked += missing
            if len(times.steps) == first + num_steps:
                client.put([ExitMsg()])

        times = _Times(on_step)
        client.put([request() for _ in range(num_running)])
        run(Scheduler(config), InstantExecutor(), inbox, outbox, meter=times)
    return times.steps[first : first + num_steps]


def measure_steps(kind: str, num_running: int, num_steps: int) -> dict[str, float]:
    """Return median microseconds of each part, of the whole turn and of the yardstick."""
    before = yardstick()
    steps = drive(num_running, num_steps, mixed=kind == "mixed")
    reference = (before + yardstick()) / 2
    totals = [step["total"] / 1e3 for step in steps]
    total = statistics.median(totals)
    parts = {f"{part}_us": statistics.median(step[part] for step in steps) / 1e3 for part in PARTS}
    return parts | {
        "total_us": total,
        "total_p99_us": float(np.percentile(totals, 99)),
        "yardstick_us": reference,
        "total_in_yardsticks": total / reference,
    }


def yardstick() -> float:
    """Return the microseconds of a fixed plain Python loop over a dict: a thousand rounds, best of
    20."""
    times = []
    for _ in range(20):
        table = dict.fromkeys(range(64), 0)
        start = time.perf_counter_ns()
        for index in range(1000):
            table[index & 63] += index
        times.append(time.perf_counter_ns() - start)
    return min(times) / 1e3


# --- output ------------------------------------------------------------------------------------


def _medians(rounds: list[dict[str, float]]) -> dict[str, Any]:
    """Return the medians of the rounds, with the spread of the total."""
    totals = [values["total_us"] for values in rounds]
    medians = {
        name: round(statistics.median(values[name] for values in rounds), 2) for name in rounds[0]
    }
    return {**medians, "rounds_total_us": [round(total, 2) for total in totals]}


def _show(steps: list[dict[str, Any]], tree: list[dict[str, Any]]) -> None:
    names = (*(f"{part}_us" for part in PARTS), "total_us", "total_p99_us")
    heads = "".join(f"{name.removesuffix('_us'):>11}" for name in names)
    print(f"microseconds a step (medians)\n{'':<12}{heads}   in loops")
    for row in steps:
        values = "".join(f"{row[name]:11,.1f}" for name in names)
        print(f"{row['name']:<12}{values}{row['total_in_yardsticks']:11.2f}")
    print(f"prefix tree of {tree[0]['cached_tokens']:,} tokens, microseconds: median, p99")
    for row in tree:
        print(f"{row['name']:<42}{row['median_us']:11,.1f}{row['p99_us']:11,.1f}")
