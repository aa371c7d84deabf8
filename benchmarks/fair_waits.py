"""What a light key waits for beside a heavy key's flood, in simulated time.

The scheduler, its loop, the server's shares and late planning are the real ones. The device is a
model of a GPU's speed (`benchmarks.stalls.times_of`), the same that the scheduler plans with.
Nothing sleeps, so the same flags print the same numbers. The heavy key's requests are all there at
the start. The light key asks one request after the other; its answers have 8 tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from benchmarks.stalls import times_of
from minisgl.benchmark.arguments import above_zero, add_json, benchmark_parser, natural
from minisgl.benchmark.report import write_json
from minisgl.core import Accepted, Event, Finished, Plan, SamplingParams, StepResult, Token
from minisgl.core.executor import Flight
from minisgl.core.step_times import StepTimes
from minisgl.message import ExitMsg, SchedulerMsg, TextReply, TokenPrompt, UserMsg, ids_to_bytes
from minisgl.scheduler import Scheduler, SchedulerConfig, run
from minisgl.server.keys import Job, Key, KeyEntry
from minisgl.scheduler.io import SourceInbox, Source
from minisgl.scheduler.late_planning import LatePlanning
from minisgl.runtime.watched_loop import step_s
from minisgl.server.shares import Shares

VOCAB_SIZE: Final = 30_000
PAGE_SIZE: Final = 16
LIGHT_OUTPUT: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """num_flood: requests of the heavy key, all there at time 0. prompts, outputs: ranges of their
    lengths. light_prompt, light_output: tokens. gaps: seconds before the light key's first request,
    and from each of its answers to the next."""

    num_flood: int
    prompts: tuple[int, int]
    outputs: tuple[int, int]
    light_prompt: int
    light_output: int = LIGHT_OUTPUT
    gaps: Sequence[float]


@dataclass(slots=True)
class World:
    """A clock, a device, clients and the server's shares, as the loop meets them. Mutable.

    step_s: the time of a step. waits: seconds to the first token of each light request.
    """

    load: Load
    rng: np.random.Generator
    step_s: Callable[[Plan], float]
    now: float = 0.0
    free_at: float = 0.0
    num_asked: int = 0
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
        """Messages of a time that has come. It is the next one's, if that is within `timeout_s`."""
        load, found = self.load, list[SchedulerMsg]()
        if not self.jobs:
            for _ in range(self.load.num_flood):
                sizes = map(int, self.rng.integers(*zip(self.load.prompts, self.load.outputs, strict=True)))
                found.append(self._ask("heavy", self.now, *sizes))
        if self.num_asked == len(self.load.gaps):
            return found if self.is_asking else [ExitMsg()]
        arrival = self.answered_at + self.load.gaps[self.num_asked]
        until = self.now + (0 if found or timeout_s is None else timeout_s)
        if not self.is_asking and arrival <= until:
            self.now = max(self.now, arrival)
            self.is_asking = True
            self.num_asked += 1
            found.append(self._ask("light", arrival, load.light_prompt, load.light_output))
        elif not found:
            self.now = until
        return found

    def close(self) -> None: ...

    def flight(self) -> tuple[float, float] | None:
        """When the last step that was launched begins and ends; None if it has ended."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """times: of the device. stall_s: the stall bound."""

    times: StepTimes
    stall_s: float

    def step_s(self, plan: Plan) -> float:
        return step_s(self.times, plan)


def serve(world: World, config: SchedulerConfig, *, overlap: bool, late: bool = True) -> Scheduler:
    """Run the world's requests until the light key has all answers. late: plan late."""
    scheduler = Scheduler(config, clock=lambda: world.now)
    source: Source = world
    if late:
        source = LatePlanning(world, world.flight, lambda: None, lambda: world.now)
    run(scheduler, world, SourceInbox(source), world, overlap=overlap)
    assert len(world.waits) == len(world.load.gaps)
    return scheduler
