"""The state of a replica that its scheduler reports to a router."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from minisgl.core import SamplingParams
from minisgl.core.step_times import StepTimes
from minisgl.message import UserMsg, ids_to_bytes
from minisgl.scheduler import Scheduler, SchedulerConfig
from minisgl.scheduler.meter import LoopMeter
from minisgl_bench.fakes import InstantExecutor
from minisgl_gateway.router.prefix_hashes import prompt_hashes
from minisgl_gateway.router.replica_state import ReplicaState
from minisgl_gateway.watch.replica_report import ReplicaReport

CONFIG = SchedulerConfig(
    num_pages=64,
    page_size=4,
    max_seq_len=128,
    vocab_size=1000,
    eos_ids=frozenset(),
    max_prefill_tokens=16,
    max_running=2,
)
PROMPT = np.arange(40, dtype=np.int32)
TIMES = StepTimes(prompt_us=((16, 1e6),))


class _Replica:
    """A scheduler whose steps take 0.1 s. Mutable."""

    def __init__(self, times: StepTimes = TIMES) -> None:
        self.scheduler, self.meter, self.now = Scheduler(CONFIG), LoopMeter(), 0.0
        self.report = ReplicaReport(self.scheduler, self.meter, times, self._clock)

    def _clock(self) -> float:
        """Making hashes takes 0.01 s."""
        self.now += 0.01
        return self.now

    def add(self, uid: int, ids: Any = PROMPT, max_tokens: int = 4) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        self.scheduler.add(UserMsg(uid=uid, ids=ids_to_bytes(ids), sampling=sampling))

    def step(self) -> None:
        plan = self.scheduler.plan()
        assert plan
        self.meter.launched(plan)
        self.scheduler.commit(plan, InstantExecutor().launch(plan).wait())
        self.meter.part_s[0] += 0.1
        self.now += 0.1

    def state(self) -> ReplicaState:
        return msgspec.json.decode(self.report(), type=ReplicaState)


def test_an_idle_replica_has_the_rate_of_its_start() -> None:
    state = _Replica().state()
    assert (state.queued_tokens, state.num_waiting, state.num_running) == (0, 0, 0)
    assert (state.page_size, state.num_pages, state.num_free_pages) == (4, 64, 64)
    assert (state.max_running, state.prefill_tokens_per_s, state.hashes) == (2, 16.0, b"")


def test_queued_tokens_are_the_tokens_that_are_not_computed() -> None:
    replica = _Replica()
    replica.add(0)
    replica.add(1, PROMPT + 500)
    assert replica.state().queued_tokens == 80
    replica.step()
    state = replica.state()
    assert (state.queued_tokens, state.num_running + state.num_waiting) == (64, 2)
    while replica.scheduler.runnable and replica.state().queued_tokens:
        replica.step()
    assert replica.state().num_running == 2, "they decode, and nothing is queued"


def test_rates_are_measured_while_prompts_wait() -> None:
    replica = _Replica()
    replica.add(0, max_tokens=1)
    replica.add(1, PROMPT + 500, max_tokens=1)
    replica.state()
    for _ in range(3):
        replica.step()
    first = replica.state()
    assert first.prefill_tokens_per_s == 16.0, "when the measuring began, there was no queue"
    replica.add(2, PROMPT + 700, max_tokens=1)
    for _ in range(3):
        replica.step()
    assert replica.state().prefill_tokens_per_s == 160.0, "16 tokens each 0.1 s"
    while replica.scheduler.runnable:
        replica.step()
    assert replica.state().finished_per_s > 0


def test_the_hashes_are_those_of_the_cached_prompt() -> None:
    replica = _Replica()
    replica.add(0)
    while replica.scheduler.runnable:
        replica.step()
    told = np.frombuffer(replica.state().hashes, "<u8").tolist()
    hashes = prompt_hashes(PROMPT, 4).tolist()
    assert {hashes[9], hashes[8], hashes[5]} <= set(told)
    replica.add(1, PROMPT + 500)
    replica.step()
    again = np.frombuffer(replica.state().hashes, "<u8").tolist()
    assert again == told, "they were made a moment ago, and may take 1 % of the time"
    replica.now += 1.0
    assert len(replica.state().hashes) // 8 > len(told)


def test_the_time_of_a_row_has_its_share_of_a_step_and_its_context() -> None:
    replica = _Replica(StepTimes(prompt_us=((16, 1e6),), row_us=100.0, context_ns=50.0))
    assert replica.state().row_s == 100e-6
    replica.add(0, max_tokens=4)
    replica.step()
    in_use = replica.scheduler.requests.cache.num_used_pages * 4
    assert in_use
    assert replica.state().row_s == round(100e-6 + in_use * 50e-9, 9)
    while replica.scheduler.runnable:
        replica.step()
    state = replica.state()
    assert (state.num_finished, state.num_output_tokens) == (1, 4)
