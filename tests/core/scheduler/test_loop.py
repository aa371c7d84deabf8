"""The turns of the loop."""

from __future__ import annotations

from helpers.scheduling import make
from minisgl.core import Accepted, Event, Finished, Plan, SamplingParams
from minisgl.core.plan import Flight
from minisgl.message import UserMsg, ids_to_bytes
from minisgl.scheduler import run
from minisgl_bench.fakes import InstantExecutor, ListInbox, ListOutbox


def test_a_device_that_waits_gets_the_prompts_of_one_step_first() -> None:
    """Five prompts arrive at once, of which two fill a step. The others are handled next."""
    scheduler = make()
    seen: list[str] = []

    class Outbox(ListOutbox):
        def send(self, events: list[Event]) -> None:
            seen.extend(f"accepted {event.uid}" for event in events if isinstance(event, Accepted))
            super().send(events)

    class Executor(InstantExecutor):
        def launch(self, plan: Plan) -> Flight:
            seen.append(f"launched {plan.uids}")
            return super().launch(plan)

    sampling = SamplingParams(max_tokens=1)
    prompts = [[uid] * 16 for uid in range(5)]
    burst = [
        UserMsg(uid=uid, ids=ids_to_bytes(ids), sampling=sampling)
        for uid, ids in enumerate(prompts)
    ]
    inbox, outbox = ListInbox([burst], lambda: [] if scheduler.runnable else None), Outbox()
    run(scheduler, Executor(), inbox, outbox)
    assert seen == [
        *(f"accepted {uid}" for uid in (0, 1)),
        "launched [0, 1]",
        *(f"accepted {uid}" for uid in (2, 3, 4)),
        "launched [2, 3]",
        "launched [4]",
    ]
    assert sum(isinstance(event, Finished) for event in outbox.events) == 5
