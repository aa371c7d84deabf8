"""Rules of routing requests: a simulation with the real router, scheduler and prefix tree.

Discrete events over a trace: requests arrive at random times (a seed each). Each replica is a real
scheduler whose steps take the time of Qwen3-14B on an H200 (`_step_s`); it reports its state once a
second, as a server does. Beside the router: round robin, two choices at random by load,
consistent hashing of the first blocks, and one engine with the pages and the speed of all.
"""

from __future__ import annotations

import heapq
import time
from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Final
from zlib import crc32

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from minisgl.core import SamplingParams
from minisgl.core.event import Finished, Token
from minisgl.core.plan import Plan
from minisgl.core.req import IdArray
from minisgl.core.step_times import StepTimes
from minisgl.message import UserMsg, ids_to_bytes
from minisgl.scheduler import Scheduler, SchedulerConfig
from minisgl.scheduler.meter import LoopMeter
from minisgl_bench.arguments import add_json, benchmark_parser, natural
from minisgl_bench.fakes import InstantExecutor
from minisgl_bench.report import write_json
from minisgl_bench.workload import trace
from minisgl_gateway.router.prefix_hashes import prompt_hashes
from minisgl_gateway.router.replica_state import ReplicaState
from minisgl_gateway.router.view import Sent, View, Views
from minisgl_gateway.watch.replica_report import ReplicaReport

PAGE_SIZE, CHUNK, MAX_RUNNING, MAX_SEQ_LEN = 64, 2048, 64, 131_072
STATE_EVERY_S: Final = 1.0
VOCAB_SIZE: Final = 32_000
POLICIES: Final = ("prefix", "two_choices", "round_robin", "hashing")

# Qwen3-14B on one H200 (benchmarks/results/offline-qwen3-14b.json): 22,990 prompt tokens a second,
# 143 steps of one row, and 6,723 tokens a second with up to 256 rows.
# A token of context is 160 KiB that are read at 4 TB/s, a pair in attention 0.8 Mflop at 400 T/s.
PREFILL_US = 1e6 / 22_990
TIMES: Final = StepTimes(
    prompt_us=((160, 7_000.0), (CHUNK, CHUNK * PREFILL_US)),
    decode_us=7_000.0,
    row_us=120.0,
    context_ns=41.0,
    attend_ns=2.0,
)


@dataclass(frozen=True, slots=True)
class _Request:
    """A line of the trace. hashes: those of its whole pages."""

    ids: IdArray
    max_tokens: int
    hashes: list[int]


class _Replica:
    """A scheduler and its device. Mutable. speed: a multiple of one H200's."""

    def __init__(self, num_pages: int, clock: Callable[[], float], speed: int = 1) -> None:
        self.scheduler = Scheduler(
            SchedulerConfig(
                num_pages=num_pages,
                page_size=PAGE_SIZE,
                max_seq_len=MAX_SEQ_LEN,
                vocab_size=VOCAB_SIZE,
                eos_ids=frozenset(),
                max_prefill_tokens=CHUNK * speed,
                max_running=MAX_RUNNING * speed,
            ),
            clock=clock,
        )
        self._meter, self._executor, self._speed = LoopMeter(), InstantExecutor(), speed
        self.report = ReplicaReport(self.scheduler, self._meter, TIMES, clock)
        self.plan: Plan | None = None
        self.busy_s, self.num_open = 0.0, 0

    def begin(self) -> float | None:
        """Plan a step. Returns its seconds, or None if there is no work."""
        self.plan = self.scheduler.plan()
        if self.plan is None:
            return None
        self._meter.launched(self.plan)
        seconds = TIMES.plan_s(self.plan) / self._speed
        self._meter.part_s[0] += seconds
        self.busy_s += seconds
        return seconds

    def end(self) -> list[Any]:
        assert self.plan
        return self.scheduler.commit(self.plan, self._executor.launch(self.plan).wait())


class _Run:
    """One run of a trace under one policy. Mutable: its clock."""

    def __init__(
        self,
        requests: Sequence[_Request],
        arrivals: Sequence[float],
        policy: str,
        num: int,
        pages: int,
    ) -> None:
        self.now = 0.0
        self._requests, self._arrivals = requests, arrivals
        self._policy = policy
        self._rng = np.random.default_rng(len(policy))
        clock = lambda: self.now  # noqa: E731  # one expression
        if policy == "one_engine":
            self.replicas = [_Replica(num * pages, clock, speed=num)]
        else:
            self.replicas = [_Replica(pages, clock) for _ in range(num)]
        self._views = Views()
        self._each = [View(str(index)) for index in range(len(self.replicas))]
        self._sent: dict[int, tuple[int, Sent | None]] = {}
        self._ring = sorted(
            (hash((point, index)) % 2**32, index)
            for index in range(len(self.replicas))
            for point in range(100)
        )
        self.ttft_s: dict[int, float] = {}

    def run(self) -> None:
        events: list[tuple[float, int, str, int]] = []
        numbers = count()

        def at(when: float, kind: str, index: int) -> None:
            heapq.heappush(events, (when, next(numbers), kind, index))

        for index, when in enumerate(self._arrivals):
            at(when, "arrival", index)
        if self._policy == "prefix":
            for index in range(len(self.replicas)):
                at(0.0, "state", index)
        num_left = len(self._requests)
        while num_left:
            self.now, _, kind, index = heapq.heappop(events)
            replica = self.replicas[index if kind != "arrival" else self._place(index)]
            if kind == "state":
                state = msgspec.json.decode(replica.report(), type=ReplicaState)
                self._views.update(self._each[index], state, self.now)
                at(self.now + STATE_EVERY_S, "state", index)
                continue
            if kind == "step":
                num_left -= self._finish(replica)
            if (kind == "step" or replica.plan is None) and (seconds := replica.begin()):
                at(self.now + seconds, "step", self.replicas.index(replica))

    def _finish(self, replica: _Replica) -> int:
        """Commit a step. Returns the number of requests that ended."""
        num_ended = 0
        for event in replica.end():
            if isinstance(event, Token) and event.uid not in self.ttft_s:
                self.ttft_s[event.uid] = self.now - self._arrivals[event.uid]
                if sent := self._sent[event.uid][1]:
                    sent.started_at = self.now
            elif isinstance(event, Finished):
                replica.num_open -= 1
                num_ended += 1
        return num_ended

    def _place(self, uid: int) -> int:
        """Give an arriving request to a replica. Returns its index."""
        request = self._requests[uid]
        index, sent = self._choose(uid, request)
        self._sent[uid] = index, sent
        replica = self.replicas[index]
        replica.num_open += 1
        sampling = SamplingParams(temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True)
        replica.scheduler.add(UserMsg(uid=uid, ids=ids_to_bytes(request.ids), sampling=sampling))
        return index

    def _choose(self, uid: int, request: _Request) -> tuple[int, Sent | None]:
        num = len(self.replicas)
        if self._policy == "prefix":
            num_tokens = len(request.ids)
            view, cached = self._views.choose(
                self._each, num_tokens, request.hashes, PAGE_SIZE, self.now
            )
            sent = self._views.send(view, num_tokens - cached, request.hashes, self.now)
            return self._each.index(view), sent
        if self._policy == "two_choices" and num > 1:
            a, b = self._rng.choice(num, 2, replace=False)
            return int(min((a, b), key=lambda i: self.replicas[i].num_open)), None
        if self._policy == "hashing":
            key = crc32(request.ids[:HASHED_TOKENS].tobytes())
            return self._ring[bisect(self._ring, (key, -1)) % len(self._ring)][1], None
        return uid % num, None

    def result(self) -> dict[str, float]:
        stats = [replica.scheduler.stats for replica in self.replicas]
        ttft = np.array(list(self.ttft_s.values()))
        busy = [replica.busy_s for replica in self.replicas]
        return {
            "cached": sum(s.num_cached_tokens for s in stats)
            / sum(s.num_prompt_tokens for s in stats),
            "ttft_p50_s": float(np.percentile(ttft, 50)),
            "ttft_p99_s": float(np.percentile(ttft, 99)),
            "busiest": max(busy) / (sum(busy) / len(busy)),
        }


HASHED_TOKENS: Final = 1024
"""Tokens that consistent hashing reads: the first 512 are the same in most of the trace's
prompts."""


def _requests(path: Path, num: int) -> list[_Request]:
    requests = []
    for session in trace(path, vocab_size=VOCAB_SIZE, count=num).sessions:
        turn = session.turns[0]
        ids = turn.ids[: MAX_SEQ_LEN - 4096]
        hashes = prompt_hashes(ids, PAGE_SIZE).tolist()
        requests.append(_Request(ids, min(turn.max_tokens, 2048), hashes))
    return requests


def decision_us(num_replicas: int, rounds: int = 200) -> dict[str, float]:
    """Return the CPU microseconds of a choice for a prompt of 858 pages, which some replicas have
    in part."""
    rng = np.random.default_rng(0)
    views, each = Views(), [View(str(index)) for index in range(num_replicas)]
    prompt = rng.integers(0, 2**63, 858, dtype=np.uint64)
    update_s = []
    for index, view in enumerate(each):
        hashes = rng.integers(0, 2**63, 1024, dtype=np.uint64)
        hashes[: 10 if index % 3 else 0] = prompt[: 10 if index % 3 else 0]
        state = ReplicaState(
            page_size=16, num_pages=10_000, num_free_pages=5_000, num_waiting=0, num_running=index,
            max_running=10_000, queued_tokens=int(rng.integers(0, 9999)),
            prefill_tokens_per_s=20_000.0, hashes=hashes.tobytes(),
        )  # fmt: skip
        views.update(view, state, 0.0)
        hashes[-100:] = rng.integers(0, 2**63, 100, dtype=np.uint64)  # a second later
        state = msgspec.structs.replace(state, hashes=hashes.tobytes())
        began = time.process_time()
        views.update(view, state, 0.0)
        update_s.append(time.process_time() - began)
    asked = prompt.tolist()
    times = []
    for _ in range(rounds):
        began = time.process_time()
        views.choose(each, len(asked) * 16, asked, 16, 0.0)
        times.append(time.process_time() - began)
    return {
        "replicas": num_replicas,
        "choice_us": round(float(np.median(times)) * 1e6, 1),
        "state_us": round(float(np.mean(update_s)) * 1e6, 1),
    }


def main(argv: Sequence[str]) -> int:
    parser = benchmark_parser(__name__, __doc__)
    parser.add_argument("--trace", type=Path, required=True, metavar="FILE", help="Mooncake's")
    parser.add_argument("--count", type=natural, default=1000, help="requests")
    parser.add_argument("--replicas", type=natural, default=2, help="number of replicas")
    parser.add_argument(
        "--pages", type=natural, default=9000, help="pages of 64 tokens of each replica"
    )
    parser.add_argument(
        "--rates", default="1,1.5,2", help="requests per second and replica, with commas between"
    )
    parser.add_argument("--seeds", type=natural, default=5, help="draws of the arrivals")
    add_json(parser)
    args = parser.parse_args(argv)
    requests = _requests(args.trace, args.count)
    table = Table("rate", "policy", "cached", "of one", "p50 s", "p99 s", "busiest", box=None)
    rows = []
    for rate in map(float, args.rates.split(",")):
        means: dict[str, dict[str, float]] = {}
        for policy in ("one_engine", *POLICIES):
            runs = []
            for seed in range(args.seeds):
                gaps = np.random.default_rng(seed).exponential(
                    1 / (rate * args.replicas), len(requests)
                )
                run = _Run(requests, np.cumsum(gaps).tolist(), policy, args.replicas, args.pages)
                run.run()
                runs.append(run.result())
            means[policy] = {name: float(np.mean([r[name] for r in runs])) for name in runs[0]}
            row: dict[str, Any] = {"name": f"{policy} at {rate:g}/s", "rate": rate}
            rows.append({**row, "policy": policy, "each": runs, **means[policy]})
            mean = means[policy]
            of_one = mean["cached"] / means["one_engine"]["cached"]
            values = (
                mean["cached"],
                of_one,
                *(mean[n] for n in ("ttft_p50_s", "ttft_p99_s", "busiest")),
            )
            table.add_row(f"{rate:g}", policy, *(f"{value:.3f}" for value in values))
    decisions = [decision_us(num) for num in (10, 100, 1000)]
    console = Console(highlight=False)
    console.print(table)
    for row in decisions:
        console.print(row)
    if args.json:
        notes = {"count": len(requests), "replicas": args.replicas, "pages": args.pages}
        write_json(args.json, {"kind": "router", **notes, "rows": rows, "decisions": decisions})
    return 0
