"""A device that computes no model but notices every mistake in a plan.

Its "KV" of a token is the token's id, written to the slot that the plan names; its "model" hashes
the ids that it reads back through the page table. A page that was given away too early, shared
wrongly, or never written gives a wrong token, and the oracle (`fake_next_id` over the true
sequence) sees it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from minisgl.core.plan import PROMISED, Plan, StepFailed, StepOutcome, StepResult
from minisgl.core.req import IdArray
from minisgl.errors import EngineError

_UNWRITTEN = -(2**31)


def fake_next_id(ids: IdArray, seed: int, output_idx: int, vocab_size: int) -> int:
    """The fake model: a hash of the whole sequence, the seed and the output index."""
    mixed = hash((ids.tobytes(), seed, output_idx))
    return mixed % vocab_size


@dataclass(frozen=True, slots=True)
class _Done:
    outcome: StepOutcome

    def wait(self) -> StepOutcome:
        return self.outcome


class FakeExecutor:
    """Runs plans as they are launched. Mutable: it is the device's state.

    fail_steps: steps that fail, and with which share of their rows: maps a step to the number of
    its uids (from the back) to blame.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        max_running: int,
        vocab_size: int,
        fail_steps: dict[int, int] | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.page_size = page_size
        self._kv = np.full(num_pages * page_size, _UNWRITTEN, np.int32)
        self._page_table = np.full((max_running, num_pages), -1, np.int32)
        self._last_token = np.full(max_running, _UNWRITTEN, np.int32)
        self._seeds: dict[int, int] = {}
        self._fail_steps = fail_steps or {}

    def launch(self, plan: Plan) -> _Done:
        for table_idx, sampling in plan.begins:
            self._seeds[table_idx] = sampling.seed or 0
            self._page_table[table_idx] = -1
            self._last_token[table_idx] = _UNWRITTEN
        for table_idx, index, page in plan.new_pages:
            self._page_table[table_idx, index] = page
        if plan.step in self._fail_steps:
            count = max(1, min(self._fail_steps[plan.step], plan.num_rows))
            self._last_token[:] = _UNWRITTEN
            return _Done(
                StepFailed(error=EngineError("the fake failed"), uids=tuple(plan.uids[-count:]))
            )
        self._write(plan)
        next_ids = []
        for row, output_idx in zip(plan.sample_rows, plan.output_idxs, strict=True):
            table_idx = plan.table_idxs[row]
            ids = self._kv[self._slots(table_idx, 0, plan.ends[row])]
            token = fake_next_id(ids, self._seeds[table_idx], output_idx, self.vocab_size)
            self._last_token[table_idx] = token
            next_ids.append(token)
        return _Done(StepResult(next_ids=next_ids))

    def _write(self, plan: Plan) -> None:
        at = 0
        for table_idx, start, end in zip(plan.table_idxs, plan.starts, plan.ends, strict=True):
            ids = plan.token_ids[at : at + end - start].copy()
            at += end - start
            ids[ids == PROMISED] = self._last_token[table_idx]
            self._kv[self._slots(table_idx, start, end)] = ids

    def _slots(self, table_idx: int, start: int, end: int) -> npt.NDArray[np.int64]:
        positions = np.arange(start, end)
        pages = self._page_table[table_idx, positions // self.page_size].astype(np.int64)
        assert (pages >= 0).all(), "a row reaches beyond its pages"
        slots: npt.NDArray[np.int64] = pages * self.page_size + positions % self.page_size
        return slots


class InstantExecutor:
    """Samples token 7 for every row at once: leaves nothing but the scheduler's own time."""

    def launch(self, plan: Plan) -> _Done:
        return _Done(StepResult(next_ids=[7] * len(plan.sample_rows)))
