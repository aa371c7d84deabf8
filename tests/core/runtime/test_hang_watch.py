"""Hangs are noticed, and what only takes long is not taken for one."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from minisgl.core import Plan
from minisgl.core.image import Image, RowImages
from minisgl.core.step_times import StepTimes
from minisgl.errors import WorkerHung
from minisgl.message import ids_to_bytes
from minisgl.runtime.watched_loop import SLACK, WatchedLoopMeter
from minisgl.runtime.worker import Worker
from minisgl.runtime.workers import Workers
from minisgl.scheduler.requests import SchedulerStats
from minisgl.utils import hangs
from minisgl.utils.hangs import MAX_INTERVAL_S, HangWatch, Heart, Heartbeat, Pulse, Stopwatch
from minisgl.utils.process import WorkerStatus

TIMEOUT_S = 10.0
TIMES = StepTimes(
    prompt_us=((64, 100_000.0), (128, 200_000.0)),
    decode_us=50_000.0,
    row_us=1_000.0,
    context_ns=100.0,
    attend_ns=10.0,
)


def prompt(num_tokens: int, start: int = 0) -> Plan:
    return Plan(
        step=0, uids=[0], table_idxs=[0], starts=[start], ends=[start + num_tokens],
        token_ids=np.zeros(num_tokens, np.int32), num_decodes=0, sample_rows=[0], output_idxs=[0],
    )  # fmt: skip


class Clock:
    """Replaces the clock of `HangWatch`. Mutable."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


class Supervised:
    """Workers that are mere pipes, watched on a clock of the test's."""

    def __init__(self, clock: Clock, *names: str, is_spread: bool = False) -> None:
        self.clock = clock
        self.hearts: dict[str, Heart] = {}
        self.workers: list[Worker] = []
        for name in names:
            ours, theirs = multiprocessing.Pipe(duplex=False)
            no_process: Any = None
            self.workers.append(Worker(name=name, process=no_process, status=ours))
            self.hearts[name] = Heart(theirs, Pulse())
        self.watch = HangWatch(TIMEOUT_S, is_spread=is_spread)

    def run(self, seconds: float, **beats: Heartbeat | None) -> WorkerHung | None:
        """Check twice a second; each worker sends its beat of `beats` before each check."""
        for _ in range(round(seconds * 2)):
            self.clock.now += 0.5
            for name, heart in self.hearts.items():
                if beat := beats.get(name):
                    heart.send(beat)
            if hung := self.watch.check(self.workers):
                return hung[1]
        return None


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(hangs, "time", clock)
    return clock


def test_silence_is_noticed_after_the_timeout(clock: Clock) -> None:
    server = Supervised(clock, "engine", "detokenizer")
    assert server.run(60, engine=Heartbeat(), detokenizer=Heartbeat()) is None
    assert server.run(TIMEOUT_S, detokenizer=Heartbeat()) is None
    error = server.run(1, detokenizer=Heartbeat())
    assert error
    assert error.worker == "engine"
    assert "the engine process has given no sign of life for 10 s" in str(error)


def test_a_sign_of_life_within_the_timeout_is_enough(clock: Clock) -> None:
    server = Supervised(clock, "engine")
    for _ in range(5):
        assert server.run(TIMEOUT_S - 1) is None
        assert server.run(0.5, engine=Heartbeat()) is None


def test_a_pause_of_the_supervisor_is_no_hang_of_a_worker(clock: Clock) -> None:
    server = Supervised(clock, "engine")
    assert server.run(1, engine=Heartbeat()) is None
    clock.now += 3600
    assert server.run(TIMEOUT_S - MAX_INTERVAL_S) is None
    assert server.run(2)


def test_a_worker_may_announce_that_it_will_be_silent(clock: Clock) -> None:
    server = Supervised(clock, "engine")
    assert server.run(0.5, engine=Heartbeat(quiet_s=30)) is None
    assert server.run(TIMEOUT_S + 30) is None
    assert server.run(1)


@pytest.mark.parametrize(("is_spread", "extra_s"), [(False, 0), (True, 2)])
def test_a_loop_without_progress_is_noticed(is_spread: bool, extra_s: float, clock: Clock) -> None:
    names = ("engine-0", "engine-1")
    server, most_s = Supervised(clock, *names, is_spread=is_spread), TIMEOUT_S + extra_s
    for late_s, is_noticed in ((0, False), (1, True)):
        beats = dict.fromkeys(names, Heartbeat()) | {names[0]: Heartbeat(overdue_s=most_s + late_s)}
        error = server.run(30, **beats)
        assert bool(error) == is_noticed
    assert f"the {names[0]} process makes no progress" in str(error)


@pytest.mark.parametrize("earlier_s", [0.0, 1.0])
def test_the_silent_worker_is_named_not_the_one_that_waits_for_it(
    earlier_s: float, clock: Clock
) -> None:
    """earlier_s: by how much the turn that waits began before the silence."""
    server = Supervised(clock, "engine-0", "engine-1")
    hearts = server.hearts
    for half_seconds in range(60):
        clock.now += 0.5
        hearts["engine-0"].send(Heartbeat(overdue_s=half_seconds / 2 + earlier_s))
        if hung := server.watch.check(server.workers):
            assert hung[1].worker == "engine-1"
            assert "the engine-1 process has given no sign of life" in str(hung[1])
            assert clock.now <= TIMEOUT_S + 1
            return
    pytest.fail("nothing was noticed")


def test_a_loop_without_progress_is_named_not_a_worker_that_was_silent_for_a_while(
    clock: Clock,
) -> None:
    server = Supervised(clock, "engine-0", "tokenizer-0")
    assert server.run(4, **{"engine-0": Heartbeat(overdue_s=TIMEOUT_S)}) is None
    error = server.run(1, **{"engine-0": Heartbeat(overdue_s=TIMEOUT_S + 1)})
    assert error
    assert error.worker == "engine-0"


def test_the_end_of_a_worker_is_not_a_hang(clock: Clock) -> None:
    server = Supervised(clock, "engine")
    server.hearts["engine"]._connection.close()
    assert server.run(60) is None


def test_what_makes_no_progress_is_not_ready_and_a_long_turn_is_progress(clock: Clock) -> None:
    server = Supervised(clock, "engine", "detokenizer")

    def stalled(seconds: float, engine: Heartbeat | None, text: Heartbeat | None) -> str | None:
        assert server.run(seconds, engine=engine, detokenizer=text) is None
        return server.watch.stalled(server.workers)

    assert stalled(30, Heartbeat(), Heartbeat()) is None
    assert stalled(1.5, None, Heartbeat()) is None
    assert stalled(3, None, Heartbeat()) == ("the engine process has given no sign of life for 4 s")
    assert stalled(1, Heartbeat(), Heartbeat()) is None
    assert stalled(5, Heartbeat(quiet_s=600), Heartbeat()) is None
    assert str(stalled(1, Heartbeat(), Heartbeat(overdue_s=3))).startswith(
        "the detokenizer process makes no progress"
    )


# --- in the worker -------------------------------------------------------------------------------


def overdue(pulse: Pulse, *, seconds: float, watch: Stopwatch | None = None) -> float:
    watch = watch or Stopwatch(pulse)
    watch.look(0.5)
    return [watch.look(0.5).overdue_s for _ in range(round(seconds * 2))][-1]


def test_only_a_turn_that_does_not_end_is_overdue() -> None:
    pulse = Pulse()
    assert overdue(pulse, seconds=60) == 0  # it has not begun
    pulse.turn()
    assert overdue(pulse, seconds=60) == 60
    watch = Stopwatch(pulse)
    for _ in range(20):
        pulse.turn()
        assert overdue(pulse, seconds=1, watch=watch) == 1
    pulse.rest()
    assert overdue(pulse, seconds=60) == 0


def test_a_pause_of_the_process_is_not_the_loops() -> None:
    pulse = Pulse()
    pulse.turn()
    watch = Stopwatch(pulse)
    watch.look(0.5)
    assert watch.look(3600).overdue_s == MAX_INTERVAL_S


def test_a_long_prefill_is_no_hang() -> None:
    pulse = Pulse()
    meter = WatchedLoopMeter(pulse, TIMES)
    meter.begin(asleep=True)
    meter.launched(prompt(10_000))  # 15.625 s by the model
    model_s = TIMES.plan_s(prompt(10_000))
    assert 15 < model_s < 16
    assert overdue(pulse, seconds=60) == 0
    assert overdue(pulse, seconds=SLACK * model_s + 10) == pytest.approx(10, abs=0.5)


def test_the_tower_of_a_large_image_is_no_hang() -> None:
    """Nor does such a step say when it will end: the tower runs only if its output is not kept."""
    pulse, times = Pulse(), replace(TIMES, image_ns=1000.0)
    meter = WatchedLoopMeter(pulse, times)
    meter.begin(asleep=True)
    image = Image(digest=b"", places=ids_to_bytes([70, 71]), token=1, shape=(10**6,), sizes=())
    for start, image_s in ((6, 0.0), (7, 1.0), (71, 1.0), (72, 0.0), (64, 1.0)):
        plan = prompt(64, start)
        plan.images.append(RowImages(0, [image]))
        assert times.images_s(plan) == image_s
    meter.launched(plan)
    assert pulse.allowed_s() == pytest.approx(SLACK * (times.plan_s(plan) + 1))
    assert meter.flight() is None


def test_a_turn_may_take_as_long_as_the_steps_in_flight() -> None:
    pulse = Pulse()
    meter = WatchedLoopMeter(pulse, TIMES)
    scheduler: Any = SimpleNamespace(stats=SchedulerStats())
    meter.begin(asleep=True)
    for _ in range(2):
        meter.launched(prompt(64))
    assert pulse.allowed_s() == pytest.approx(SLACK * 0.2)
    meter.settled(prompt(64), scheduler)
    assert pulse.allowed_s() == pytest.approx(SLACK * 0.1)
    meter.settled(prompt(64), scheduler)
    assert pulse.allowed_s() == 0
    meter.end(scheduler, idle=True)
    assert pulse.state is None


def test_the_model_of_a_step_counts_each_row() -> None:
    plan = Plan(
        step=0, uids=[0, 1, 2, 3], table_idxs=[0, 1, 2, 3], starts=[9, 19, 100, 0],
        ends=[10, 20, 164, 62], token_ids=np.zeros(128, np.int32), num_decodes=2,
        sample_rows=[0], output_idxs=[0],
    )  # fmt: skip
    contexts, pairs = (10 + 20) * 100e-9, 64 * 100 * 10e-9
    assert TIMES.plan_s(plan) == pytest.approx(0.2 + contexts + pairs)


def test_without_measured_times_no_turn_is_too_long() -> None:
    pulse = Pulse()
    meter = WatchedLoopMeter(pulse, None)
    meter.begin(asleep=False)
    meter.launched(prompt(64))
    assert overdue(pulse, seconds=3600) == 0


# --- real processes ------------------------------------------------------------------------------


def _loop(status: WorkerStatus) -> None:
    status.ready({})
    while True:
        status.pulse.turn()
        time.sleep(0.01)


def _stuck_loop(status: WorkerStatus) -> None:
    status.ready({})
    status.pulse.turn()
    time.sleep(600)


@pytest.fixture
def workers() -> Iterator[Workers]:
    workers = Workers()
    workers._hang_watch = HangWatch(4.0)
    yield workers
    workers.kill()


def watch(workers: Workers, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        workers.check()
        time.sleep(0.1)


def test_a_stopped_process(workers: Workers) -> None:
    workers._start("engine", _loop)
    workers.wait_ready()
    watch(workers, 1.5)
    pid = workers.processes[0].process.pid
    assert pid
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(WorkerHung, match="the engine process has given no sign of life"):
        watch(workers, 60)
    began = time.monotonic()
    workers.end("it hangs")
    assert time.monotonic() - began < 30
    assert workers.processes[0].process.exitcode == -signal.SIGKILL


def test_a_process_whose_loop_hangs(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    workers._start("engine", _stuck_loop)
    workers.wait_ready()
    with pytest.raises(WorkerHung, match="the engine process makes no progress"):
        watch(workers, 60)
