"""The cost of requests: shares of device time and energy, with a fake clock and power."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec
import pytest

from minisgl.core import Finished, SamplingParams
from minisgl.core.plan import Executor, Flight, Plan, StepOutcome
from minisgl.core.step_times import StepTimes
from minisgl.message import AbortMsg, SchedulerMsg, UserMsg, ids_to_bytes
from minisgl.scheduler import Scheduler, SchedulerConfig, run
from minisgl_bench.fakes import FakeExecutor, ListInbox, ListOutbox
from minisgl_gateway.watch.cost import CostedExecutor, CostedOutbox, Ledger

STEP_S, WATTS = 0.125, 40.0


@dataclass
class World:
    """Mutable: a clock, and a device of constant power, unknown after `fails_after_s`."""

    now: float = 100.0
    busy_s: float = 0.0
    fails_after_s: float = float("inf")
    is_busy: bool = False

    def busy(self) -> None:
        assert not self.is_busy
        self.is_busy = True

    def idle(self) -> None:
        assert self.is_busy
        self.is_busy = False

    def watts(self) -> float | None:
        return WATTS if self.busy_s < self.fails_after_s else None


class SteadyExecutor:
    """Each step ends `STEP_S` after the one before, when the loop waits for it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._inner = FakeExecutor(num_pages=64, page_size=4, max_running=8, vocab_size=50)

    def launch(self, plan: Plan) -> Flight:
        return _SteadyFlight(self._inner.launch(plan), self._world)


class _SteadyFlight(Flight):
    def __init__(self, flight: Flight, world: World) -> None:
        self._flight, self._world = flight, world

    def wait(self) -> StepOutcome:
        assert self._world.is_busy
        self._world.now += STEP_S
        self._world.busy_s += STEP_S
        return self._flight.wait()


CONFIG = SchedulerConfig(
    num_pages=64, page_size=4, max_seq_len=60, vocab_size=50, eos_ids=frozenset(),
    max_prefill_tokens=16, max_running=8,
)  # fmt: skip


def serve(
    world: World,
    ledger: Ledger,
    turns: list[list[SchedulerMsg]],
    config: SchedulerConfig = CONFIG,
) -> list[Finished]:
    scheduler = Scheduler(config)
    outbox = ListOutbox()
    executor: Executor = CostedExecutor(SteadyExecutor(world), ledger)
    inbox = ListInbox(turns, more=lambda: [] if scheduler.runnable else None)
    run(scheduler, executor, inbox, CostedOutbox(outbox, ledger))
    return [event for event in outbox.events if isinstance(event, Finished)]


def request(uid: int, num_prompt: int, num_output: int) -> UserMsg:
    sampling = SamplingParams(temperature=0.0, max_tokens=num_output)
    ids = ids_to_bytes([(7 * uid + index) % 50 for index in range(num_prompt)])
    return UserMsg(uid=uid, ids=ids, sampling=sampling)


def test_the_costs_of_requests_add_up_to_the_use_of_the_device() -> None:
    world = World()
    ledger = Ledger(world, lambda: world.now)
    ends = serve(world, ledger, [[request(1, 12, 6), request(2, 4, 6)]])
    costs = {end.uid: end.cost for end in ends}
    assert costs[1]
    assert costs[2]
    # The last launched step of a request that has ended may be for nobody.
    assert world.busy_s - 2 * STEP_S <= costs[1][0] + costs[2][0] <= world.busy_s
    for device_s, joules in (costs[1], costs[2]):
        assert joules == pytest.approx(device_s * WATTS)
    # The first step has 12 and 4 tokens, the others one of each.
    assert costs[1][0] == pytest.approx(STEP_S * (12 / 16 + 5 / 2))
    assert costs[2][0] == pytest.approx(STEP_S * (4 / 16 + 5 / 2))
    assert not ledger._costs, "what has ended is forgotten"
    assert not world.is_busy


def test_a_request_whose_first_step_is_a_decode_has_a_cost() -> None:
    """Its last prompt token does not fit the stall bound beside another prompt, so it starts
    without a chunk. In the next step it is a decode row."""
    times = StepTimes(prompt_us=((1, 10.0), (64, 640.0)), decode_us=10.0, attend_ns=1e6)
    config = replace(CONFIG, max_stall_s=1e-3, step_times=times)
    world = World()
    ledger = Ledger(world, lambda: world.now)
    first, second = request(1, 17, 20), request(2, 8, 2)
    again = msgspec.structs.replace(request(1, 17, 2), uid=3)
    turns: list[list[SchedulerMsg]] = [[first], [], [], [second, again]]
    costs = {end.uid: end.cost for end in serve(world, ledger, turns, config)}
    assert all(cost and cost[0] > 0 for cost in costs.values()), costs
    assert not ledger._costs


def test_the_energy_of_an_idle_device_belongs_to_no_request() -> None:
    world = World()
    ledger = Ledger(world, lambda: world.now)
    (first,) = serve(world, ledger, [[request(1, 8, 4)]])
    world.now += 1000
    (second,) = serve(world, ledger, [[request(2, 8, 4)]])
    assert first.cost
    assert first.cost == pytest.approx(second.cost)


def test_an_aborted_request_reports_its_cost_and_leaves_the_ledger() -> None:
    world = World()
    ledger = Ledger(world, lambda: world.now)
    turns: list[list[SchedulerMsg]] = [[request(1, 8, 40)], [], [], [AbortMsg(uid=1)]]
    (end,) = serve(world, ledger, turns)
    assert end.reason == "abort"
    assert end.cost
    assert 0 < end.cost[0] <= world.busy_s
    assert not ledger._costs


def test_requests_go_on_when_the_power_becomes_unknown() -> None:
    world = World(fails_after_s=2 * STEP_S)
    ends = serve(world, Ledger(world, lambda: world.now), [[request(1, 8, 6)]])
    assert [end.reason for end in ends] == ["length"]
    assert ends[0].cost is None
