"""A fake device without a model. If a plan is wrong, its tokens are wrong.

The KV of a token is its id, written to the slots that the plan names. The next token is a hash of
the ids that a row reads through the page tables: all ids in a full group, the last `window` in a
window group. In a state group the row reads the state at the last multiple of `interval`, which is
a hash of all ids before it; a step computes a state from the page of an earlier one. A rows group
has the ids since then. The token is wrong if a page was freed too early, shared wrongly or never
written, or if a state is stale or written in the same step. `fake_next_id` of the true sequence is
the right token.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from minisgl.core.groups import FULL, CacheGroup
from minisgl.core.plan import (
    PROMISED,
    Flight,
    Plan,
    Pooled,
    Score,
    StepFailed,
    StepOutcome,
    StepResult,
)
from minisgl.core.req import FloatArray, IdArray, Mask
from minisgl.errors import EngineError

_UNWRITTEN = -(2**31)


def _hash(parts: Iterable[bytes | int]) -> int:
    """Return a hash that is the same in each process, unlike Python's of bytes."""
    value = 0
    for part in parts:
        value = zlib.crc32(part if isinstance(part, bytes) else b"%d," % part, value)
    return value


def fake_next_id(
    ids: IdArray,
    seed: int,
    output_idx: int,
    vocab_size: int,
    groups: Sequence[CacheGroup] = (FULL,),
    mask: Mask | None = None,
) -> int:
    """Return the fake model's next id: a hash of the ids that each group shows, the seed and the
    index. If the mask forbids it, the next allowed id is returned."""
    seen: list[bytes | int] = []
    for group in groups:
        if group.kind == "state":
            seen.append(_state(0, ids[: group.newest(len(ids))], group))
        elif group.kind == "rows":
            seen.append(ids[group.newest(len(ids)) :].tobytes())
        else:
            seen.append((ids[-group.window :] if group.kind == "window" else ids).tobytes())
    return _token(seen, seed, output_idx, vocab_size, mask)


def _token(
    seen: list[bytes | int], seed: int, output_idx: int, vocab_size: int, mask: Mask | None
) -> int:
    token = _hash((*seen, seed, output_idx)) % vocab_size
    while mask is not None and not int(mask[token // 32]) >> token % 32 & 1:
        token = (token + 1) % vocab_size
    return token


def _state(state: int, ids: IdArray, group: CacheGroup) -> int:
    """Return the state after `ids`, which are whole intervals, if `state` is the one before
    them."""
    for start in range(0, len(ids), group.interval):
        state = _hash((state, ids[start : start + group.interval].tobytes()))
    return state


def fake_logprob(ids: IdArray, next_id: int) -> float:
    """Return the fake log-probability of a prompt's token after these ids."""
    return -float(_hash((ids.tobytes(), int(next_id))) % 1000)


@dataclass(frozen=True, slots=True)
class _Done(Flight):
    outcome: StepOutcome

    def wait(self) -> StepOutcome:
        return self.outcome


class _FailedFlight(_Done):
    def sample_late(self, masks: Sequence[Mask]) -> None:
        """Nothing is left to sample."""


@dataclass(slots=True)
class _FakeFlight(Flight):
    """A step whose ids `sample` returns, at its launch or late. Mutable: it keeps them."""

    sample: Callable[[dict[int, Mask]], list[int]]
    late_rows: list[int]
    scores: list[Score]
    pooled: list[FloatArray]
    next_ids: list[int] | None = None

    def sample_late(self, masks: Sequence[Mask]) -> None:
        assert self.next_ids is None, "sampled twice"
        self.next_ids = self.sample(dict(zip(self.late_rows, masks, strict=True)))

    def wait(self) -> StepOutcome:
        assert self.next_ids is not None, "the late rows are not sampled"
        return StepResult(next_ids=self.next_ids, scores=self.scores, pooled=self.pooled)


class FakeExecutor:
    """Runs a plan when it is launched. Mutable: it has the device's memory.

    groups: cache groups with their pages, instead of the `num_pages` of one full group. A state
    group needs another group that shows the tokens of an interval. fail_steps: step that fails ->
    the number of its last rows whose requests fail.
    """

    def __init__(
        self,
        *,
        num_pages: int = 0,
        page_size: int,
        max_running: int,
        vocab_size: int,
        fail_steps: dict[int, int] | None = None,
        groups: Sequence[CacheGroup] = (),
    ) -> None:
        self.vocab_size = vocab_size
        self.page_size = page_size
        self.groups = tuple(groups) or (CacheGroup(num_pages=num_pages),)
        # Per group: ids by slot, or states by page.
        self._memory = [
            np.full(
                group.num_pages * (1 if group.kind == "state" else page_size),
                _UNWRITTEN,
                np.int64 if group.kind == "state" else np.int32,
            )
            for group in self.groups
        ]
        self._page_table = np.full((len(self.groups), max_running + 1, 1), -1, np.int32)
        self._last_token = np.full(max_running + 1, _UNWRITTEN, np.int32)
        self._seeds: dict[int, int] = {}
        self._fail_steps = fail_steps or {}

    def launch(self, plan: Plan) -> Flight:
        for table_idx, sampling in plan.begins:
            self._seeds[table_idx] = sampling.seed or 0
            self._page_table[:, table_idx] = -1
            self._last_token[table_idx] = _UNWRITTEN
        for number, table_idx, first, pages in plan.new_pages:
            end = first + len(pages)
            self._grow_tables(end - 1)
            self._page_table[number, table_idx, first:end] = pages
        if plan.step in self._fail_steps:
            count = max(1, min(self._fail_steps[plan.step], plan.num_rows))
            self._last_token[:] = _UNWRITTEN
            return _FailedFlight(
                StepFailed(error=EngineError("the fake failed"), uids=tuple(plan.uids[-count:]))
            )
        ids_of_rows = self._ids(plan)
        self._write(plan, ids_of_rows)
        states = self._update_states(plan, ids_of_rows)
        scores = [self._score(plan, *scored) for scored in plan.scored]
        pooled = [self._pool(plan, each) for each in plan.pooled]
        flight = _FakeFlight(
            lambda masks: self._sample(plan, states, masks), plan.late_rows, scores, pooled
        )
        if plan.late_rows:
            sampled = [plan.table_idxs[row] for row in plan.sample_rows]
            self._last_token[sampled] = _UNWRITTEN
        else:
            flight.sample_late([])
        return flight

    def _sample(
        self, plan: Plan, states: dict[tuple[int, int], int], masks: dict[int, Mask]
    ) -> list[int]:
        next_ids = []
        samples = zip(plan.sample_rows, plan.output_idxs, strict=True)
        for sample, (row, output_idx) in enumerate(samples):
            table_idx, end = plan.table_idxs[row], plan.ends[row]
            seen: list[bytes | int] = []
            for index, group in enumerate(self.groups):
                if group.kind == "state":
                    seen.append(states[row, index])
                else:
                    start = max(end - group.window, 0) if group.kind == "window" else 0
                    start = group.newest(end) if group.kind == "rows" else start
                    seen.append(self._read(index, table_idx, start, end).tobytes())
            seed, mask = self._seeds[table_idx], masks.get(sample)
            token = _token(seen, seed, output_idx, self.vocab_size, mask)
            self._last_token[table_idx] = token
            next_ids.append(token)
        return next_ids

    def _score(self, plan: Plan, row: int, next_ids: IdArray, num_top: int) -> Score:
        """Return a row's scores, from the ids in the first group, which must be full."""
        assert self.groups[0].kind == "full"
        ends = range(plan.starts[row] + 1, plan.starts[row] + 1 + len(next_ids))
        ids = self._read(0, plan.table_idxs[row], 0, ends[-1])
        logprobs = [fake_logprob(ids[:end], id) for end, id in zip(ends, next_ids, strict=True)]
        return Score(logprobs, [[(end, 0.0)] * num_top for end in ends])

    def _pool(self, plan: Plan, pooled: Pooled) -> FloatArray:
        """Return the sum over the pooled tokens of a hash of the ids up to them."""
        first = plan.starts[pooled.row] + pooled.first
        ids = self._read(0, plan.table_idxs[pooled.row], 0, first + pooled.num_tokens)
        ends = range(first + 1, first + 1 + pooled.num_tokens)
        return np.array([sum(fake_logprob(ids[:end], 0) for end in ends)], np.float32)

    def _grow_tables(self, index: int) -> None:
        missing = index + 1 - self._page_table.shape[2]
        if missing > 0:
            padding = ((0, 0), (0, 0), (0, missing))
            self._page_table = np.pad(self._page_table, padding, constant_values=-1)

    def _ids(self, plan: Plan) -> list[IdArray]:
        """Return each row's ids, with the sampled token in the place of a promised one."""
        lengths = np.subtract(plan.ends, plan.starts)
        parts = np.split(plan.token_ids.copy(), np.cumsum(lengths)[:-1])
        for table_idx, ids in zip(plan.table_idxs, parts, strict=True):
            ids[ids == PROMISED] = self._last_token[table_idx]
        return parts

    def _write(self, plan: Plan, ids_of_rows: list[IdArray]) -> None:
        stored = dict(plan.stored)
        rows = zip(plan.table_idxs, plan.starts, plan.ends, ids_of_rows, strict=True)
        for row, (table_idx, start, end, ids) in enumerate(rows):
            for index, group in enumerate(self.groups):
                first = start
                if group.kind == "full":
                    first = min(max(start, stored.get(row, 0)), end)
                if group.kind == "rows":
                    first = max(start, group.newest(end))
                if group.kind != "state":
                    slots = self._slots(index, table_idx, first, end)
                    self._memory[index][slots] = ids[first - start :]

    def _update_states(self, plan: Plan, ids_of_rows: list[IdArray]) -> dict[tuple[int, int], int]:
        """Write the new states to their pages. Returns the state of each (row, group) after this
        step. Rows read the pages as they were before this step, drafts also what the row before
        them has written."""
        states: dict[tuple[int, int], int] = {}
        first_draft = plan.num_decodes - plan.num_drafts
        for index, group in enumerate(self.groups):
            if group.kind != "state":
                continue
            written: dict[tuple[int, int], tuple[int, int]] = {}
            rows = zip(plan.table_idxs, plan.starts, plan.ends, ids_of_rows, strict=True)
            for row, (table_idx, start, end, new_ids) in enumerate(rows):
                before, after = group.newest(start), group.newest(end)
                is_draft = first_draft <= row < plan.num_decodes
                state = 0
                if is_draft and (table_idx, before) in written:
                    _, state = written[table_idx, before]
                elif before:
                    state = int(self._memory[index][self._state_page(index, table_idx, before)])
                if after > before:
                    assert not is_draft, "a state is made of a token that may be wrong"
                    old_ids = self._read(self._group_with_rows(group), table_idx, before, start)
                    ids = np.concatenate((old_ids, new_ids[: after - start]))
                    state = _state(state, ids, group)
                    page = self._state_page(index, table_idx, after)
                    written[table_idx, after] = page, state
                states[row, index] = state
            for page, state in written.values():
                self._memory[index][page] = state
        return states

    def _group_with_rows(self, state: CacheGroup) -> int:
        """Return the index of a group that has the ids since the last multiple of the interval."""
        return next(
            index
            for index, group in enumerate(self.groups)
            if group.kind == "full"
            or group.window >= state.interval
            or (group.kind == "rows" and group.interval % state.interval == 0)
        )

    def _state_page(self, index: int, table_idx: int, position: int) -> int:
        page = int(self._page_table[index, table_idx, position // self.page_size - 1])
        assert page >= 0, "a row has no page for its state"
        return page

    def _read(self, index: int, table_idx: int, start: int, end: int) -> IdArray:
        ids = self._memory[index][self._slots(index, table_idx, start, end)]
        return ids.astype(np.int32, copy=False)

    def _slots(self, index: int, table_idx: int, start: int, end: int) -> npt.NDArray[np.int64]:
        positions = np.arange(start, end)
        self._grow_tables(end // self.page_size)
        table = self._page_table[index, table_idx]
        pages = table[positions // self.page_size].astype(np.int64)
        assert (pages >= 0).all(), "a row reaches beyond its pages"
        slots: npt.NDArray[np.int64] = pages * self.page_size + positions % self.page_size
        return slots


class InstantExecutor:
    """Samples token 7 for every row at once, to measure the time of the scheduler alone."""

    def launch(self, plan: Plan) -> _Done:
        return _Done(StepResult(next_ids=[7] * len(plan.sample_rows)))
