"""What scheduling costs: microseconds a step by part, prefix-tree operations, what overlap hides.

The loop is the real `run` with the real ZeroMQ inbox and outbox, so a step decodes and encodes
what it would in a server; the executor answers at once, so nothing but the host's time is left. A
fixed Python loop is timed beside every case: the ratio to it compares between machines.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from minisgl.benchmark.report import machine_load, write_json
from minisgl.core import Event, Finished, Plan, SamplingParams
from minisgl.core.executor import Executor, Flight
from minisgl.core.plan import StepOutcome
from minisgl.kvcache import create_prefix_cache
from minisgl.message import ExitMsg, SchedulerMsg, UserMsg, ids_to_bytes
from minisgl.scheduler import Scheduler, SchedulerConfig, run
from minisgl.scheduler.io import ZmqInbox, ZmqOutbox
from minisgl.testing import InstantExecutor
from minisgl.utils.zmq import Endpoints, PullQueue, PushQueue

PARTS = ("receive", "plan", "launch", "commit", "send")
PAGE_SIZE = 16
VOCAB_SIZE = 32_000
WARM_UP_STEPS = 20
CHUNK_TOKENS = 2048  # prompt tokens a step; all prompts here are whole chunks of a step
TREE_TOKENS = 1_000_000


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m minisgl.benchmark scheduler", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--running", type=int, nargs="+", default=[1, 64, 256, 1024])
    parser.add_argument("--steps", type=int, default=400, help="steps of each case (default: 400)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of all cases (default: 3)")
    parser.add_argument("--json", metavar="FILE", help="write the results there")
    args = parser.parse_args(argv)
    load = machine_load()
    cases = [(kind, count) for kind in ("decode", "mixed") for count in args.running]
    measured: dict[tuple[str, int], list[dict[str, float]]] = {case: [] for case in cases}
    for _ in range(args.rounds):  # interleaved: a slow second of the machine meets every case
        for kind, count in cases:
            measured[kind, count].append(measure_steps(kind, count, args.steps))
    steps = [
        {"name": f"{kind} {count}", "kind": kind, "running": count, **_medians(rounds)}
        for (kind, count), rounds in measured.items()
    ]
    tree = [row for page_size in (1, PAGE_SIZE) for row in measure_tree(page_size)]
    overlap = measure_overlap(256, device_s=0.002, steps=args.steps)
    _show(steps, tree, overlap)
    if args.json:
        result = {"kind": "scheduler", "load_before": load, "steps_each": args.steps}
        write_json(args.json, {**result, "steps": steps, "tree": tree, "overlap": overlap})
    return 0


# --- steps -------------------------------------------------------------------------------------


class _Timed:
    """Hands calls on and keeps their times by part; a step ends when its events are sent.

    Mutable: it collects. It is the loop's scheduler, executor, inbox and outbox at once, so that
    the loop itself stays the real one.
    """

    def __init__(
        self, scheduler: Scheduler, executor: Executor, inbox: ZmqInbox, outbox: ZmqOutbox
    ):
        self._scheduler, self._executor, self._inbox, self._outbox = (
            scheduler,
            executor,
            inbox,
            outbox,
        )
        self._spent = dict.fromkeys(PARTS, 0)
        self.steps: list[dict[str, int]] = []
        self.on_step: Callable[[int], None] = lambda finished: None
        self._finished = 0

    def _add(self, part: str, start: int) -> None:
        self._spent[part] += time.perf_counter_ns() - start

    def take(self, timeout_s: float) -> Sequence[SchedulerMsg]:
        start = time.perf_counter_ns()
        messages = self._inbox.take(timeout_s if not self.steps else 0)
        self._add("receive", start)
        return messages

    @property
    def runnable(self) -> bool:
        return self._scheduler.runnable

    def handle(self, message: Any) -> list[Event]:
        start = time.perf_counter_ns()
        events = self._scheduler.handle(message)
        self._add("receive", start)
        return events

    def plan(self) -> Plan | None:
        start = time.perf_counter_ns()
        plan = self._scheduler.plan()
        self._add("plan", start)
        return plan

    def launch(self, plan: Plan) -> Flight:
        start = time.perf_counter_ns()
        flight = self._executor.launch(plan)
        self._add("launch", start)
        return flight

    def commit(self, plan: Plan, outcome: StepOutcome) -> list[Event]:
        start = time.perf_counter_ns()
        events = self._scheduler.commit(plan, outcome)
        self._add("commit", start)
        self._finished = sum(isinstance(event, Finished) for event in events)
        self._committed = True
        return events

    _committed = False

    def send(self, events: list[Event]) -> None:
        start = time.perf_counter_ns()
        self._outbox.send(events)
        self._add("send", start)
        if self._committed:
            self._committed = False
            self.steps.append(self._spent)
            self._spent = dict.fromkeys(PARTS, 0)
            self.on_step(self._finished)

    def pong(self, seq: int) -> None:
        raise AssertionError("nobody pings")


@contextmanager
def _sockets() -> Iterator[tuple[ZmqInbox, ZmqOutbox, PushQueue]]:
    """A scheduler's own sockets, a sender to it, and a detokenizer that never reads."""
    with ExitStack() as stack:
        endpoints = Endpoints.create()
        stack.callback(endpoints.remove)
        sink: PullQueue[Any] = PullQueue(endpoints.detokenizer, Any)
        inbox, outbox = ZmqInbox(endpoints), ZmqOutbox(endpoints)
        client = PushQueue(endpoints.scheduler)
        for queue in (sink, inbox, outbox, client):
            stack.callback(queue.close)
        yield inbox, outbox, client


def make_scheduler(num_running: int) -> Scheduler:
    return Scheduler(
        SchedulerConfig(
            num_pages=num_running * 256,
            page_size=PAGE_SIZE,
            max_seq_len=4096,
            vocab_size=VOCAB_SIZE,
            eos_ids=frozenset(),
            max_prefill_tokens=CHUNK_TOKENS,
            max_running=num_running,
        )
    )


def measure_steps(kind: str, num_running: int, num_steps: int) -> dict[str, float]:
    """Median microseconds of each part, of the whole, and of the yardstick.

    decode: `num_running` requests, nothing else. mixed: answers of 128 tokens, and each request
    that ends is replaced by a new one with a prompt of 128, so a step decodes and prefills.
    """
    mixed = kind == "mixed"
    rng = np.random.default_rng(0)
    num_sent = 0

    def request() -> UserMsg:
        nonlocal num_sent
        # The first generation ends spread over 128 steps, so that no step ends everybody.
        length = 1 + num_sent * 128 // num_running if num_sent < num_running else 128
        sampling = SamplingParams(
            temperature=0.0, max_tokens=length if mixed else num_steps * 2 + 1000, ignore_eos=True
        )
        num_sent += 1
        ids = rng.integers(0, VOCAB_SIZE, 128, dtype=np.int32)
        return UserMsg(uid=num_sent, ids=ids_to_bytes(ids), sampling=sampling)

    yardsticks = [yardstick()]
    with _sockets() as (inbox, outbox, client):
        executor = InstantExecutor()
        timed = _Timed(make_scheduler(num_running), executor, inbox, outbox)
        # Prompts are prefilled first: CHUNK_TOKENS // 128 of them a step.
        first = WARM_UP_STEPS + num_running * 128 // CHUNK_TOKENS + (128 if mixed else 0)

        def on_step(finished: int) -> None:
            if mixed and finished:
                client.put([request() for _ in range(finished)])
            if len(timed.steps) == first + num_steps:
                client.put([ExitMsg()])

        timed.on_step = on_step
        client.put([request() for _ in range(num_running)])
        loop: Any = timed
        run(loop, loop, loop, loop)
        steps = timed.steps[first : first + num_steps]
    yardsticks.append(yardstick())
    medians = {
        f"{part}_us": statistics.median(step[part] for step in steps) / 1e3 for part in PARTS
    }
    total = statistics.median(sum(step.values()) for step in steps) / 1e3
    p99 = float(np.percentile([sum(step.values()) for step in steps], 99)) / 1e3
    reference = statistics.mean(yardsticks)
    return medians | {
        "total_us": total,
        "total_p99_us": p99,
        "yardstick_us": reference,
        "total_in_yardsticks": total / reference,
    }


def yardstick() -> float:
    """Microseconds of a fixed loop of plain Python over a dict: a thousand rounds, best of 20."""
    times = []
    for _ in range(20):
        table = dict.fromkeys(range(64), 0)
        start = time.perf_counter_ns()
        for index in range(1000):
            table[index & 63] += index
        times.append(time.perf_counter_ns() - start)
    return min(times) / 1e3


# --- the prefix tree ---------------------------------------------------------------------------


def measure_tree(page_size: int) -> Iterator[dict[str, Any]]:
    """Median microseconds of an operation on a tree that holds `TREE_TOKENS` tokens.

    Prompts of 1,024 tokens, of which 256 are one of 32 system prompts. A step number of 0: all
    were written long ago.
    """
    rng = np.random.default_rng(0)
    cache = create_prefix_cache("radix", page_size)
    systems = rng.integers(0, VOCAB_SIZE, (32, 256), dtype=np.int32)
    num_prompts = (TREE_TOKENS - systems.size) // 768 + 1
    next_page = 0

    def prompt(index: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        own = rng.integers(0, VOCAB_SIZE, 768, dtype=np.int32)
        return np.concatenate([systems[index % 32], own])

    def insert(ids: np.ndarray[Any, np.dtype[np.int32]]) -> None:
        nonlocal next_page
        root = cache.match(ids[:0])
        count = len(ids) // page_size
        cache.insert(root, ids, list(range(next_page, next_page + count)), 0)
        next_page += count

    prompts = [prompt(index) for index in range(num_prompts)]
    for ids in prompts:
        insert(ids)
    num_cached = cache.num_evictable * page_size
    assert num_cached >= TREE_TOKENS, num_cached
    fresh = [prompt(index) for index in range(500)]
    hits = [prompts[index] for index in rng.integers(0, num_prompts, 500)]
    strangers = list(rng.integers(0, VOCAB_SIZE, (500, 1024), dtype=np.int32))
    handles = [cache.match(ids) for ids in hits]

    def lock(index: int) -> None:
        cache.lock(handles[index])
        cache.unlock(handles[index])

    operations: dict[str, Callable[[int], object]] = {
        "match, all 1,024 tokens": lambda index: cache.match(hits[index]),
        "match, system prompt only": lambda index: cache.match(fresh[index]),
        "match, nothing": lambda index: cache.match(strangers[index]),
        "lock and unlock": lock,
        "insert 768 new tokens": lambda index: insert(fresh[index]),
        "evict 1,024 tokens": lambda index: cache.evict(1024 // page_size),
    }
    for name, operation in operations.items():
        times = []
        for index in range(500):
            start = time.perf_counter_ns()
            operation(index)
            times.append(time.perf_counter_ns() - start)
        yield {
            "name": f"{name}, page size {page_size}",
            "cached_tokens": num_cached,
            "median_us": round(statistics.median(times) / 1e3, 2),
            "p99_us": round(float(np.percentile(times, 99)) / 1e3, 2),
        }


# --- overlap -----------------------------------------------------------------------------------


class _ClockDevice:
    """A device that needs `device_s` for each step, one after another, and no host time.

    Mutable: it knows until when it is busy. The host waits by watching the clock, since a sleep
    wakes up to 0.1 ms late.
    """

    def __init__(self, device_s: float) -> None:
        self._device_s = device_s
        self._free_at = 0.0

    def launch(self, plan: Plan) -> Flight:
        self._free_at = max(time.perf_counter(), self._free_at) + self._device_s
        return _ClockFlight(self._free_at, InstantExecutor().launch(plan))


class _ClockFlight:
    def __init__(self, ready_at: float, flight: Flight) -> None:
        self._ready_at, self._flight = ready_at, flight

    def wait(self) -> StepOutcome:
        while time.perf_counter() < self._ready_at:
            pass
        return self._flight.wait()


def measure_overlap(num_running: int, device_s: float, steps: int) -> dict[str, float]:
    """Milliseconds a decode step with and without overlap, over a device of known speed.

    Host time is what a step takes beyond the device's when nothing overlaps.
    """
    step_ms = {}
    first = WARM_UP_STEPS + num_running * 128 // CHUNK_TOKENS
    num_steps = first + steps
    for overlap in (True, False):
        with _sockets() as (inbox, outbox, client):
            timed = _Timed(make_scheduler(num_running), _ClockDevice(device_s), inbox, outbox)
            times: list[float] = []

            def on_step(finished: int, times: list[float] = times, client: Any = client) -> None:
                times.append(time.perf_counter())
                if len(times) == num_steps:
                    client.put([ExitMsg()])

            timed.on_step = on_step
            sampling = SamplingParams(temperature=0.0, max_tokens=2 * steps + 1000, ignore_eos=True)
            rng = np.random.default_rng(0)
            client.put(
                [
                    UserMsg(
                        uid=uid,
                        ids=ids_to_bytes(rng.integers(0, VOCAB_SIZE, 128, dtype=np.int32)),
                        sampling=sampling,
                    )
                    for uid in range(num_running)
                ]
            )
            loop: Any = timed
            run(loop, loop, loop, loop, overlap=overlap)
            step_ms[overlap] = float(np.median(np.diff(times[first:]))) * 1e3
    device_ms = device_s * 1e3
    host_ms = step_ms[False] - device_ms
    return {
        "running": num_running,
        "device_ms": device_ms,
        "overlap_step_ms": round(step_ms[True], 4),
        "no_overlap_step_ms": round(step_ms[False], 4),
        "host_ms": round(host_ms, 4),
        "hidden_share": round((step_ms[False] - step_ms[True]) / host_ms, 4),
    }


# --- output ------------------------------------------------------------------------------------


def _medians(rounds: list[dict[str, float]]) -> dict[str, Any]:
    """Of the rounds, with the spread of the total."""
    totals = [values["total_us"] for values in rounds]
    medians = {
        name: round(statistics.median(values[name] for values in rounds), 2) for name in rounds[0]
    }
    return {**medians, "rounds_total_us": [round(total, 2) for total in totals]}


def _show(
    steps: list[dict[str, Any]], tree: list[dict[str, Any]], overlap: dict[str, float]
) -> None:
    console = Console()
    table = Table(title="microseconds a step (medians)")
    columns = ("name", *(f"{part}_us" for part in PARTS), "total_us", "total_p99_us")
    for column in (*columns, "total_in_yardsticks"):
        table.add_column(column.removesuffix("_us").replace("_", " "), justify="right")
    for row in steps:
        values = [f"{row[column]:,.1f}" for column in columns[1:]]
        table.add_row(row["name"], *values, f"{row['total_in_yardsticks']:.2f}")
    console.print(table)
    table = Table(title=f"prefix tree of {tree[0]['cached_tokens']:,} tokens, microseconds")
    for column in ("operation", "median", "p99"):
        table.add_column(column, justify="right")
    for row in tree:
        table.add_row(row["name"], f"{row['median_us']:,.1f}", f"{row['p99_us']:,.1f}")
    console.print(table)
    console.print(
        f"{overlap['running']} running over a device of {overlap['device_ms']:g} ms a step: "
        f"{overlap['no_overlap_step_ms']:.2f} ms without overlap, "
        f"{overlap['overlap_step_ms']:.2f} ms with: {overlap['hidden_share']:.0%} of the "
        "host's time is hidden"
    )
