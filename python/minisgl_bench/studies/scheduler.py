"""The cost of scheduling: microseconds of a step by part, and of prefix-tree operations.

The loop is the real `run` with the real ZeroMQ inbox and outbox, so a step decodes and encodes the
messages of a server. The executor answers at once, so only host time is left. A fixed Python loop
is timed beside each case; the ratio to it compares between machines.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from minisgl.core import Event, Finished, Plan, SamplingParams
from minisgl.core.plan import Executor, StepOutcome
from minisgl.message import ExitMsg, UserMsg, ids_to_bytes
from minisgl.scheduler import Scheduler, SchedulerConfig, run
from minisgl.scheduler.io import Message, SourceInbox, ZmqOutbox
from minisgl.server.flags import integer
from minisgl.utils.zmq import Endpoints, PullQueue, PushQueue
from minisgl_bench.arguments import add_json, benchmark_parser, natural
from minisgl_bench.fakes import InstantExecutor
from minisgl_bench.report import machine_load, write_json
from minisgl_bench.studies.prefix_tree import measure_tree

PARTS = ("receive", "plan", "launch", "commit", "send")
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


class _Timed:
    """The loop's scheduler, executor, inbox and outbox in one: it passes calls on and times them.

    So the loop itself stays the real one. Mutable: `steps` collects the nanoseconds of each part
    and of the whole turn. `on_step` gets the events of each step, in time that is not counted.
    """

    def __init__(
        self, scheduler: Scheduler, executor: Executor, inbox: SourceInbox, outbox: ZmqOutbox
    ) -> None:
        self._scheduler = scheduler
        self._spent = dict.fromkeys(PARTS, 0)
        self._committed = False
        self._began = time.perf_counter_ns()
        self._send = self._timed("send", outbox.send)
        self._commit = self._timed("commit", scheduler.commit)
        self.steps: list[dict[str, int]] = []
        self.on_step: Callable[[list[Event]], None] = lambda events: None
        self.take = self._timed("receive", inbox.take)
        self.handle = self._timed("receive", scheduler.handle)
        self.settles_first = self._timed("plan", scheduler.settles_first)
        self.plan = self._timed("plan", scheduler.plan)
        self.launch = self._timed("launch", executor.launch)

    def _timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            start = time.perf_counter_ns()
            result = call(*args)
            self._spent[part] += time.perf_counter_ns() - start
            return result

        return timed

    @property
    def runnable(self) -> bool:
        return self._scheduler.runnable

    def commit(self, plan: Plan, outcome: StepOutcome) -> list[Event]:
        self._committed = True
        events: list[Event] = self._commit(plan, outcome)
        return events

    def send(self, events: list[Event]) -> None:
        self._send(events)
        if self._committed:
            self._committed = False
            self.steps.append({**self._spent, "total": time.perf_counter_ns() - self._began})
            self._spent = dict.fromkeys(PARTS, 0)
            self.on_step(events)
            self._began = time.perf_counter_ns()


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
        timed = _Timed(Scheduler(config), InstantExecutor(), inbox, outbox)

        def on_step(events: list[Event]) -> None:
            if mixed:
                client.put([request() for event in events if isinstance(event, Finished)])
            if len(timed.steps) == first + num_steps:
                client.put([ExitMsg()])

        timed.on_step = on_step
        client.put([request() for _ in range(num_running)])
        loop: Any = timed
        run(loop, loop, loop, loop)
    return timed.steps[first : first + num_steps]


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
    console = Console()
    table = Table(title="microseconds a step (medians); 1 loop is the yardstick", box=None)
    names = ("name", *(f"{part}_us" for part in PARTS), "total_us", "total_p99_us")
    for name in (*names[:-1], "p99", "in loops"):
        table.add_column(name.removesuffix("_us"), justify="right", no_wrap=True)
    for row in steps:
        values = [f"{row[name]:,.{int(row[name] < 100)}f}" for name in names[1:]]
        table.add_row(row["name"], *values, f"{row['total_in_yardsticks']:.2f}")
    console.print(table)
    table = Table(title=f"prefix tree of {tree[0]['cached_tokens']:,} tokens, microseconds")
    for column in ("operation", "median", "p99"):
        table.add_column(column, justify="right")
    for row in tree:
        table.add_row(row["name"], f"{row['median_us']:,.1f}", f"{row['p99_us']:,.1f}")
    console.print(table)
