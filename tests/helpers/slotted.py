"""A device with slots for adapters, which checks that each row finds its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minisgl.core import Plan, StepFailed, StepOutcome
from minisgl.core.adapters import Adapter
from minisgl.core.plan import Executor, Flight
from minisgl.core.req import Mask
from minisgl.errors import AdapterLost
from minisgl.scheduler import Scheduler


class SlottedExecutor:
    """Mutable: what the slots have. lost: the digest of the adapter that cannot be loaded."""

    def __init__(self, executor: Executor, scheduler: Scheduler, lost: str = "") -> None:
        self.executor, self.scheduler, self.lost = executor, scheduler, lost
        self.slots: dict[int, Adapter] = {}
        self.rows: dict[int, int] = {}
        self.num_loads = 0

    def launch(self, plan: Plan) -> Flight:
        is_lost = any(load.adapter.digest == self.lost for load in plan.loads)
        self.num_loads += len(plan.loads)
        self.slots |= {load.slot: load.adapter for load in plan.loads}
        begun = {begin.table_idx for begin in plan.begins}
        assert begun.issuperset(slotted.table_idx for slotted in plan.adapter_slots)
        self.rows |= dict.fromkeys(begun, 0) | dict(plan.adapter_slots)
        for uid, row in zip(plan.uids, plan.table_idxs, strict=True):
            adapter = self.scheduler.requests.by_uid[uid].adapter
            assert self.slots.get(self.rows[row]) == adapter, f"step {plan.step}, uid {uid}"
        flight = self.executor.launch(plan)
        return LostFlight(flight, self.lost) if is_lost else flight


@dataclass(slots=True)
class LostFlight(Flight):
    flight: Flight
    digest: str

    def sample_late(self, masks: Sequence[Mask]) -> None:
        self.flight.sample_late(masks)

    def wait(self) -> StepOutcome:
        self.flight.wait()
        return StepFailed(
            error=AdapterLost("it is gone", digest=self.digest, folder=f"/{self.digest}"), uids=()
        )
