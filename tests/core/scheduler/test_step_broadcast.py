"""Ranks that follow broadcasts plan what rank 0 plans, and detect a difference before a launch."""

from __future__ import annotations

import dataclasses
import queue
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import pytest

from helpers.books import check_books
from minisgl.core import Plan, SamplingParams
from minisgl.core.adapters import Adapter, AdapterLoad
from minisgl.core.image import Image, RowImages
from minisgl.core.plan import Executor, Flight, History, Pooled, Scored, Slotted
from minisgl.errors import EngineError
from minisgl.message import (
    AbortMsg,
    KeyShare,
    PlanCheck,
    ProfileMsg,
    SchedulerMsg,
    StepBroadcast,
    StepBroadcastMsg,
    StopMsg,
    UserMsg,
    ids_to_bytes,
)
from minisgl.scheduler import Scheduler, SchedulerConfig, run
from minisgl.scheduler.io import NoOutbox, SourceInbox
from minisgl.scheduler.step_broadcast import Follower, Leader, digest
from minisgl_bench.fakes import FakeExecutor, ListInbox, ListOutbox

VOCAB = 50
CONFIG = SchedulerConfig(
    num_pages=24,
    page_size=4,
    max_seq_len=80,
    vocab_size=VOCAB,
    eos_ids=frozenset({3}),
    max_prefill_tokens=16,
    max_running=6,
)


class Wire:
    """Both ends of a queue between two ranks; what goes through is encoded."""

    def __init__(self) -> None:
        self._frames: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._decoder = msgspec.msgpack.Decoder(list[StepBroadcastMsg])

    def put(self, records: Sequence[msgspec.Struct]) -> None:
        self._frames.put(msgspec.msgpack.encode(records))

    def get(self, timeout_s: float | None) -> list[StepBroadcastMsg]:
        return self._decoder.decode(self._frames.get(timeout=60))

    def close(self) -> None: ...


class Script:
    """A source that plays turns of messages, then ends the run when all is done."""

    def __init__(self, turns: Sequence[Sequence[SchedulerMsg]], scheduler: Scheduler) -> None:
        self._inbox = ListInbox(turns, more=lambda: [] if scheduler.runnable else None)

    def get(self, timeout_s: float | None) -> Sequence[SchedulerMsg]:
        return self._inbox.take(0)

    def close(self) -> None: ...


class Recorder:
    """An executor that keeps the plans."""

    def __init__(self, executor: Executor) -> None:
        self.plans: list[Plan] = []
        self._executor = executor

    def launch(self, plan: Plan) -> Flight:
        self.plans.append(plan)
        return self._executor.launch(plan)


def recorder(config: SchedulerConfig = CONFIG) -> Recorder:
    return Recorder(
        FakeExecutor(
            num_pages=config.num_pages,
            page_size=config.page_size,
            max_running=config.max_running,
            vocab_size=VOCAB,
        )
    )


def random_turns(
    rng: random.Random, num_turns: int, *, has_shares: bool
) -> list[list[SchedulerMsg]]:
    """Requests with common beginnings, aborts, stops, and turns with nothing."""
    stem = [rng.randrange(4, VOCAB) for _ in range(40)]
    turns: list[list[SchedulerMsg]] = []
    num = 0
    for _ in range(num_turns):
        turn: list[SchedulerMsg] = []
        for _ in range(rng.choice((0, 0, 1, 3))):
            ids = stem[: rng.randrange(1, 40)] + [rng.randrange(4, VOCAB)] * rng.randrange(3)
            sampling = SamplingParams(max_tokens=rng.randrange(1, 24), seed=rng.randrange(99))
            share = (rng.randrange(50), rng.choice((1, 2))) if has_shares else (0, 0)
            turn.append(
                UserMsg(uid=num, ids=ids_to_bytes(ids), sampling=sampling, share=KeyShare(*share))
            )
            num += 1
        if num and rng.random() < 0.2:
            turn.append(AbortMsg(uid=rng.randrange(num)))
        if num and rng.random() < 0.2:
            turn.append(StopMsg(uid=rng.randrange(num), num_tokens=1))
        turns.append(turn)
    return turns


@pytest.mark.parametrize(("seed", "overlap"), [(0, True), (1, False), (2, False), (3, True)])
def test_all_ranks_plan_the_same(seed: int, overlap: bool) -> None:
    turns = random_turns(random.Random(seed), num_turns=60, has_shares=seed % 2 == 1)
    assert run_ranks(turns, overlap=overlap) > 50


def run_ranks(turns: Sequence[Sequence[SchedulerMsg]], *, overlap: bool) -> int:
    """Let three ranks play the turns, and compare their plans. Returns how many steps they took."""
    wires = [Wire(), Wire()]
    executors = [recorder() for _ in range(3)]
    outbox, theirs = ListOutbox(), ListOutbox()

    def lead() -> None:
        scheduler = Scheduler(CONFIG)
        leader = Leader(Script(turns, scheduler), executors[0], wires, check_every=1)
        run(scheduler, leader, SourceInbox(leader), outbox, overlap=overlap)

    def follow(rank: int) -> None:
        follower = Follower(wires[rank - 1], executors[rank], check_every=1)
        scheduler = Scheduler(CONFIG, clock=lambda: follower.now)
        run(scheduler, follower, SourceInbox(follower), theirs if rank == 1 else NoOutbox(),
            overlap=overlap)  # fmt: skip
        check_books(scheduler)

    with ThreadPoolExecutor(3) as pool:
        for ended in [pool.submit(lead), pool.submit(follow, 1), pool.submit(follow, 2)]:
            ended.result(30)
    ours, *others = (
        [dataclasses.asdict(plan) | {"token_ids": plan.token_ids.tolist()} for plan in ran.plans]
        for ran in executors
    )
    assert others == [ours, ours]
    # The same ends, but for the times in them.
    assert [type(event) for event in theirs.events] == [type(event) for event in outbox.events]
    return len(ours)


# --- when they differ ----------------------------------------------------------------------------

ASK = UserMsg(
    uid=0,
    ids=ids_to_bytes([4] * 12),
    sampling=SamplingParams(max_tokens=4, seed=0, logprobs=True, top_logprobs=1),
)


def follow_alone(
    messages: Sequence[StepBroadcastMsg], config: SchedulerConfig = CONFIG, *, check_every: int = 1
) -> tuple[Recorder, Callable[[], None]]:
    wire, executor = Wire(), recorder(config)
    wire.put(messages)
    follower = Follower(wire, executor, check_every=check_every)
    scheduler = Scheduler(config, clock=lambda: follower.now)
    return executor, lambda: run(scheduler, follower, SourceInbox(follower), NoOutbox())


def first_plan(config: SchedulerConfig = CONFIG) -> Plan:
    scheduler = Scheduler(config)
    scheduler.handle(ASK)
    plan = scheduler.plan()
    assert plan
    return plan


def test_a_plan_that_differs_is_not_launched() -> None:
    theirs = first_plan()
    ours = first_plan(dataclasses.replace(CONFIG, max_prefill_tokens=8))
    executor, go = follow_alone(
        [
            StepBroadcast(step=0, now=1.0, digest=0, messages=[ASK]),
            PlanCheck(step=0, digest=digest(theirs)),
        ],
        dataclasses.replace(CONFIG, max_prefill_tokens=8),
    )
    with pytest.raises(EngineError, match=r"the ranks' plans differ: rank 0 .* step 0") as raised:
        go()
    assert f"{digest(theirs):08x}" in str(raised.value)
    assert f"{digest(ours):08x}" in str(raised.value)
    assert executor.plans == []


def test_plans_that_differ_between_checks_are_detected_a_turn_later() -> None:
    """Before the outcome of the first is waited for, and although later plans might be equal."""
    wire, executors = Wire(), [recorder(), recorder()]

    def lead() -> None:
        scheduler = Scheduler(CONFIG)
        turns = random_turns(random.Random(1), num_turns=30, has_shares=True)
        leader = Leader(Script(turns, scheduler), executors[0], [wire])
        run(scheduler, leader, SourceInbox(leader), ListOutbox())

    lead()
    follower = Follower(wire, executors[1])
    scheduler = Scheduler(dataclasses.replace(CONFIG, num_pages=22), clock=lambda: follower.now)
    with pytest.raises(EngineError, match=r"the ranks' plans differ: before step broadcast"):
        run(scheduler, follower, SourceInbox(follower), NoOutbox())
    theirs, ours = ([digest(plan) for plan in ran.plans] for ran in executors)
    assert ours[:-1] == theirs[: len(ours) - 1]  # the last may be equal, if then it planned nothing
    assert len(theirs) > len(ours)


def test_a_plan_that_only_this_rank_has() -> None:
    executor, go = follow_alone(
        [
            StepBroadcast(step=0, now=1.0, digest=0, messages=[ASK]),
            StepBroadcast(step=1, now=1.0, digest=0, messages=[]),
        ]
    )
    with pytest.raises(EngineError, match=r"rank 0 planned nothing, this rank step 0"):
        go()
    assert executor.plans == []


def test_a_plan_that_only_rank_0_has() -> None:
    _, go = follow_alone(
        [StepBroadcast(step=0, now=1.0, digest=0, messages=[]), PlanCheck(step=0, digest=1)]
    )
    with pytest.raises(EngineError, match=r"rank 0 planned step 0, this rank did not"):
        go()


def test_a_broadcast_that_was_lost() -> None:
    _, go = follow_alone(
        [
            StepBroadcast(step=0, now=1.0, digest=0, messages=[]),
            StepBroadcast(step=2, now=1.0, digest=0, messages=[]),
        ]
    )
    with pytest.raises(EngineError, match=r"step broadcast 2 arrived where 1 was expected"):
        go()


def test_not_every_plan_is_checked() -> None:
    wire, executor = Wire(), recorder()
    leader = Leader(Script([], Scheduler(CONFIG)), executor, [wire])
    plan = first_plan()
    for step in (0, 1, 63, 64):
        plan.step = step
        leader.launch(plan)
    assert [check.step for _ in range(2) for check in wire.get(0)] == [0, 64]
    assert wire._frames.empty()


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Plan)])
def test_the_digest_sees_every_field(field: str) -> None:
    plan = first_plan()
    plan.stored = [(0, 4)]  # which a plan of one full group never has
    plan.late_rows = plan.option_rows = [0]
    plan.histories = [History(0, 12, (), b"")]
    plan.adapter_slots, plan.loads = [Slotted(0, 1)], [AdapterLoad(1, Adapter("digest", "folder"))]
    plan.scored = [Scored(0, np.array([5], np.int32), 0)]
    image = Image(digest=b"a", places=bytes(4), token=1, shape=(3, 1, 1), sizes=())
    plan.images = plan.image_begins = [RowImages(0, [image])]
    plan.pooled = [Pooled(0, 0, 1, ())]
    before = digest(plan)
    assert digest(dataclasses.replace(plan)) == before
    value = getattr(plan, field)
    changed: Any = value + 1 if isinstance(value, int) else value[:-1]
    if isinstance(value, np.ndarray):
        changed = value.copy()
        changed[-1] += 1
    elif not isinstance(value, int) and not value:
        pytest.fail(f"{field} is empty: choose another plan")
    assert digest(dataclasses.replace(plan, **{field: changed})) != before


def test_a_follower_has_rank_0s_clock_and_its_profile_messages() -> None:
    profile = ProfileMsg(seq=1, action="start")
    wire = Wire()
    wire.put([StepBroadcast(step=0, now=7.5, digest=0, messages=[profile])])
    follower = Follower(wire, recorder())
    seen: list[ProfileMsg] = []
    assert SourceInbox(follower, seen.append).take(0) == []
    assert (follower.now, seen) == (7.5, [profile])
