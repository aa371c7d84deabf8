"""The slots of adapters: each row of a step finds its own, and each request ends once."""

from __future__ import annotations

import random

import numpy as np
import pytest

from helpers.random_runs import run_once
from helpers.slotted import SlottedExecutor
from minisgl.core import Finished, SamplingParams
from minisgl.core.adapters import Adapter, AdapterLoad
from minisgl.message import MAX_NAMESPACE, AbortMsg, ExitMsg, SchedulerMsg, UserMsg, ids_to_bytes
from minisgl.scheduler import Scheduler, SchedulerConfig, run
from minisgl_bench.fakes import FakeExecutor, ListOutbox
from minisgl_zoo.lora.slots import Slots

ADAPTERS = [Adapter(digest, f"/{digest}") for digest in "abcde"]
CONFIG = SchedulerConfig(
    num_pages=64, page_size=4, max_seq_len=64, vocab_size=50, eos_ids=frozenset(),
    max_prefill_tokens=64, num_slots=2,
)  # fmt: skip


@pytest.mark.parametrize("lost", ["", "b"])
@pytest.mark.parametrize("fail", [False, True])
def test_random_runs_with_adapters(lost: str, fail: bool) -> None:
    for seed in range(40_000, 40_032):
        rng = random.Random(seed)
        count, drafts = rng.randint(1, 5), rng.random() < 0.3
        try:
            run_once(rng, fail=fail, drafts=drafts, adapters=ADAPTERS[:count], lost=lost)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def test_a_slot_is_kept_while_it_is_used_and_the_oldest_idle_one_is_filled_anew() -> None:
    slots = Slots(2)
    a, b, c, *_ = ADAPTERS
    loads: list[AdapterLoad] = []
    assert [slots.take(adapter, loads) for adapter in (a, b, a)] == [1, 2, 1]
    assert not slots.has_room(c)
    slots.leave(a)
    assert not slots.has_room(c), "another request still uses it"
    slots.leave(a)
    slots.leave(b)
    assert slots.take(a, loads) == 1, "it is still there"
    slots.leave(a)
    assert slots.take(c, loads) == 2, "b was used before a"
    assert loads == [AdapterLoad(1, a), AdapterLoad(2, b), AdapterLoad(2, c)]
    slots.leave(c)
    slots.clear()
    assert slots.take(a, loads) in (1, 2)
    assert loads[-1].adapter == a, "a failed step may not have filled it"


class Script:
    """Sends messages, each list in a turn of its own, then waits until all requests have ended."""

    def __init__(self, outbox: ListOutbox, *turns: list[SchedulerMsg], num_requests: int) -> None:
        self.outbox, self.turns, self.num_requests = outbox, list(turns), num_requests

    def take(self, timeout_s: float) -> list[SchedulerMsg]:
        if self.turns:
            return self.turns.pop(0)
        ends = sum(isinstance(event, Finished) for event in self.outbox.events)
        return [ExitMsg()] if ends == self.num_requests else []


def request(uid: int, adapter: Adapter | None, max_tokens: int) -> UserMsg:
    ids = ids_to_bytes(np.arange(uid, uid + 6, dtype=np.int32))
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    namespace = adapter.namespace("") if adapter else ""
    return UserMsg(uid=uid, ids=ids, sampling=sampling, adapter=adapter, namespace=namespace)


def ends(*turns: list[SchedulerMsg], num_requests: int) -> tuple[list[int], int]:
    """Return the uids in the order of their ends, and the number of loads."""
    outbox, scheduler = ListOutbox(), Scheduler(CONFIG)
    device = FakeExecutor(page_size=4, max_running=256, vocab_size=50, groups=CONFIG.cache_groups)
    slots = SlottedExecutor(device, scheduler)
    run(scheduler, slots, Script(outbox, *turns, num_requests=num_requests), outbox)
    return [e.uid for e in outbox.events if isinstance(e, Finished)], slots.num_loads


def test_who_waits_for_a_slot_goes_before_later_adapters_but_holds_up_no_base_request() -> None:
    a, b, c, *_ = ADAPTERS
    turns: list[list[SchedulerMsg]] = [
        [request(0, a, 8), request(1, b, 8)],
        [request(2, c, 4)],  # waits for a slot
        [request(3, a, 4), request(4, None, 2)],  # a has a slot, but c was first
    ]
    order, num_loads = ends(*turns, num_requests=5)
    assert order.index(4) == 0
    assert order.index(2) < order.index(3)
    assert num_loads in (3, 4)


def test_who_waits_for_a_slot_can_be_aborted() -> None:
    a, b, c, *_ = ADAPTERS
    turns: list[list[SchedulerMsg]] = [
        [request(0, a, 20), request(1, b, 20)],
        [request(2, c, 4)],
        [AbortMsg(uid=2)],
    ]
    assert ends(*turns, num_requests=3) == ([2, 0, 1], 2)


def test_no_client_can_name_the_namespace_of_an_adapter() -> None:
    a, b, *_ = ADAPTERS
    salts = ["", "x", "x" * MAX_NAMESPACE]
    assert all(len(a.namespace(salt)) > MAX_NAMESPACE for salt in salts)
    names = {adapter.namespace(salt) for adapter in (a, b) for salt in salts}
    assert len(names) == 2 * len(salts)
