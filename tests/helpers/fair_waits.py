"""The waits of a light key beside a heavy key's flood, in simulated time.

The scheduler, its loop, the server's shares and late planning are the real ones. The device is a
model of a GPU's speed, the one with which the scheduler plans. Nothing sleeps, so the numbers are
the same on each machine. The heavy key's requests are all there at the start. The light key asks
one request after the other; its answers have 8 tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final

import numpy as np

from minisgl.core import Accepted, Event, Finished, Plan, SamplingParams, StepResult, Token
from minisgl.core.plan import Flight
from minisgl.core.step_times import StepTimes
from minisgl.message import ExitMsg, SchedulerMsg, TextReply, TokenPrompt, UserMsg
from minisgl.scheduler import Scheduler, SchedulerConfig, run
from minisgl.scheduler.io import Source, SourceInbox
from minisgl.scheduler.late_planning import LatePlanning
from minisgl_gateway.keys.ring import Job, Key, KeyEntry
from minisgl_gateway.keys.shares import Shares

VOCAB_SIZE: Final = 30_000
PAGE_SIZE: Final = 16
SETTLE_S: Final = 6.0
"""By then the flood has filled the places, and the prompts of its first wave are computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The requests of both keys. num_flood: the heavy key's, all there at time 0. prompts, outputs:
    ranges of their lengths. light_prompt, light_output: tokens. gaps: seconds before the light
    key's first request, and from each of its answers to its next request."""

    num_flood: int
    light_prompt: int
    gaps: Sequence[float]
    prompts: tuple[int, int] = (200, 2000)
    outputs: tuple[int, int] = (200, 1000)
    light_output: int = 8


@dataclass(slots=True)
class World:
    """A clock, a device, clients and the server's shares, as the loop meets them. Mutable.

    step_s: returns the seconds of a step. waits: each light request's seconds to its first token.
    """

    load: Load
    rng: np.random.Generator
    step_s: Callable[[Plan], float]
    now: float = 0.0
    free_at: float = 0.0
    num_asked: int = 0
    num_steps_before: int = 0  # the first request of the light key
    answered_at: float = 0.0
    keys: dict[str, Key] = field(default_factory=dict)
    jobs: dict[int, tuple[str, Job, float]] = field(default_factory=dict)
    waits: dict[int, float] = field(default_factory=dict)
    steps_s: list[float] = field(default_factory=list)
    is_asking: bool = False

    def __post_init__(self) -> None:
        shares = Shares()
        for name in ("heavy", "light"):
            self.keys[name] = Key(name, KeyEntry(key=name), lambda: self.now, shares)

    def get(self, timeout_s: float | None) -> Sequence[SchedulerMsg]:
        """Return the messages that have arrived. The clock goes on to the next one's time if that
        is within `timeout_s`."""
        load, found = self.load, list[SchedulerMsg]()
        if not self.jobs:
            for _ in range(load.num_flood):
                prompt, output = (
                    int(self.rng.integers(low, high)) for low, high in (load.prompts, load.outputs)
                )
                found.append(self._ask("heavy", self.now, prompt, output))
        until = self.now + (0 if found or timeout_s is None else timeout_s)
        is_over = self.num_asked == len(load.gaps)
        if is_over and not self.is_asking:
            self.now = until
            return [ExitMsg()]
        arrival = inf if is_over else self.answered_at + load.gaps[self.num_asked]
        if not self.is_asking and arrival <= until:
            self.now = max(self.now, arrival)
            self.is_asking = True
            self.num_steps_before = self.num_steps_before or len(self.steps_s)
            self.num_asked += 1
            found.append(self._ask("light", arrival, load.light_prompt, load.light_output))
        elif not found:
            self.now = until
        return found

    def close(self) -> None: ...

    def flight(self) -> tuple[float, float] | None:
        """Return the start and end of the last launched step; None if it has ended."""
        is_over = self.free_at <= self.now
        return None if is_over else (self.free_at - self.steps_s[-1], self.free_at)

    def _ask(self, name: str, arrived: float, num_prompt: int, num_output: int) -> UserMsg:
        uid = len(self.jobs)
        ids = self.rng.integers(0, VOCAB_SIZE, num_prompt).astype(np.int32).tobytes()
        sampling = SamplingParams(max_tokens=num_output, ignore_eos=True)
        job = self.keys[name].begin(TokenPrompt(ids=ids), sampling)
        self.jobs[uid] = name, job, arrived
        return UserMsg(uid=uid, ids=ids, sampling=sampling, share=job.share)

    def launch(self, plan: Plan) -> Flight:
        self.steps_s.append(self.step_s(plan))
        self.free_at = max(self.now, self.free_at) + self.steps_s[-1]
        return _Flight(self, self.free_at, [5] * len(plan.sample_rows))

    def send(self, events: list[Event]) -> None:
        for event in events:
            name, job, arrived = self.jobs[event.uid]
            if isinstance(event, Accepted):
                job.count(event)
            elif isinstance(event, Token):
                job.count(TextReply(uid=event.uid, text="", token_ids=[event.id]))
                if name == "light":
                    self.waits.setdefault(event.uid, self.now - arrived)
            elif isinstance(event, Finished):
                job.end()
                if name == "light":
                    self.is_asking, self.answered_at = False, self.now

    def pong(self, seq: int) -> None: ...


@dataclass(slots=True)
class _Flight(Flight):
    world: World
    at: float
    ids: list[int]

    def wait(self) -> StepResult:
        self.world.now = max(self.world.now, self.at)
        return StepResult(next_ids=self.ids)


def serve(
    world: World, config: SchedulerConfig, *, overlap: bool = True, late: bool = True
) -> Scheduler:
    """Run until all of the light key's requests are answered. late: plan late."""
    scheduler = Scheduler(config, clock=lambda: world.now)
    source: Source = world
    if late:
        source = LatePlanning(world, world.flight, lambda: None, lambda: world.now)
    run(scheduler, world, SourceInbox(source), world, overlap=overlap)
    assert len(world.waits) == len(world.load.gaps)
    return scheduler


TIMES: Final = StepTimes(
    prompt_us=tuple((size, 43.46 * size) for size in (161, 2048, 8192)),
    decode_us=7000.0,
    row_us=20.0,
)
"""About Qwen3-14B on an H200: 7 ms to read the weights, 23,000 prompt tokens a second."""


def simulate(num_flood: int, *, pages_share: float = 1.0) -> tuple[float, float]:
    """Return the p99 of the light key's waits, and the longest step, in seconds.

    The light key asks 30 requests of 16 tokens; at most 16 requests run together.
    """
    rng = np.random.default_rng(16)
    gaps = [SETTLE_S if num_flood else 0.0, *rng.uniform(0.05, 0.15, 29).tolist()]
    load = Load(num_flood=num_flood, light_prompt=16, gaps=gaps)
    world = World(load=load, rng=rng, step_s=TIMES.plan_s)
    tokens = 16 * sum(map(max, (load.prompts, load.outputs)))
    config = SchedulerConfig(
        num_pages=round(pages_share * tokens) // PAGE_SIZE,
        page_size=PAGE_SIZE,
        max_seq_len=8192,
        vocab_size=VOCAB_SIZE,
        eos_ids=frozenset(),
        max_prefill_tokens=8192,
        max_stall_s=0.02,
        step_times=TIMES,
        max_running=16,
    )
    scheduler = serve(world, config)
    assert not num_flood or scheduler.requests.waiting, "the flood was over: raise num_flood"
    p99_s = float(np.percentile(list(world.waits.values()), 99))
    return p99_s, max(world.steps_s[world.num_steps_before :])
