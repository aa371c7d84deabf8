"""What a light key waits for beside a heavy key's flood, with overlap, in simulated time.

Every step takes one unit, so times are numbers of steps. A request that arrives while the server is
idle has its first token after 1. Beside a flood it may take twice that and one step more.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from minisgl.core import Accepted, Event, Finished, Plan, SamplingParams, StepResult, Token
from minisgl.core.executor import Flight
from minisgl.message import ExitMsg, SchedulerMsg, TextReply, TokenPrompt, UserMsg, ids_to_bytes
from minisgl.scheduler import Scheduler, SchedulerConfig, run
from minisgl.server.keys import Job, Key, KeyEntry
from minisgl.server.shares import Shares

CONFIG = SchedulerConfig(
    num_pages=4096,
    page_size=4,
    max_seq_len=512,
    vocab_size=100,
    eos_ids=frozenset([99]),
    max_prefill_tokens=128,
    max_running=16,
)


@dataclass
class World:
    """A clock, a device, clients and the server's shares, as the loop meets them.

    num_flood: requests of the heavy key, all there at the start. arrivals: when a request of the
    light key comes, each after the answer to the one before. waits: time to its first token.
    """

    num_flood: int
    arrivals: list[float]
    rng: random.Random
    now: float = 0.0
    free_at: float = 0.0
    jobs: dict[int, tuple[str, Job, float]] = field(default_factory=dict)
    waits: dict[int, float] = field(default_factory=dict)
    is_asking: bool = False

    def __post_init__(self) -> None:
        shares = Shares()
        self.keys = {
            name: Key(name, KeyEntry(key=name), lambda: self.now, shares)
            for name in ("heavy", "light")
        }

    def ask(self, name: str, arrived: float, num_prompt: int, num_output: int) -> UserMsg:
        uid = len(self.jobs)
        ids = ids_to_bytes([self.rng.randrange(98) for _ in range(num_prompt)])
        sampling = SamplingParams(max_tokens=num_output, ignore_eos=True)
        job = self.keys[name].begin(TokenPrompt(ids=ids), sampling)
        self.jobs[uid] = name, job, arrived
        return UserMsg(uid=uid, ids=ids, sampling=sampling, share=job.share)

    def take(self, timeout_s: float) -> Sequence[SchedulerMsg]:
        found: list[SchedulerMsg] = []
        while self.num_flood:
            self.num_flood -= 1
            sizes = self.rng.randint(20, 100), self.rng.randint(50, 200)
            found.append(self.ask("heavy", self.now, *sizes))
        if self.is_asking:
            return found
        if not self.arrivals:
            return [ExitMsg()]
        if timeout_s and not found:
            self.now = max(self.now, self.arrivals[0])
        if self.arrivals[0] <= self.now:
            self.is_asking = True
            found.append(self.ask("light", self.arrivals.pop(0), 16, 4))
        return found

    def launch(self, plan: Plan) -> Flight:
        self.free_at = max(self.now, self.free_at) + 1
        return Landing(self, self.free_at, [5] * len(plan.sample_rows))

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
                self.is_asking = self.is_asking and name != "light"

    def pong(self, seq: int) -> None: ...


@dataclass
class Landing(Flight):
    world: World
    at: float
    ids: list[int]

    def wait(self) -> StepResult:
        self.world.now = max(self.world.now, self.at)
        return StepResult(next_ids=self.ids)


@pytest.mark.parametrize(
    ("num_flood", "overlap", "most"), [(0, True, 1), (500, True, 3), (500, False, 2)]
)
def test_the_first_token_comes_after_so_many_steps(
    num_flood: int, overlap: bool, most: int
) -> None:
    rng = random.Random(1)
    arrivals = [20 + 12 * i + rng.random() for i in range(60)]
    world = World(num_flood=num_flood, arrivals=arrivals, rng=rng)
    scheduler = Scheduler(CONFIG, clock=lambda: world.now)
    run(scheduler, world, world, world, overlap=overlap)
    assert len(world.waits) == 60
    assert max(world.waits.values()) <= most
    assert scheduler.stats.num_retractions <= 60
    assert not num_flood or scheduler.requests.waiting, "the flood was not over"
