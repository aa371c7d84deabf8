"""A scheduler that checks itself after each call, devices that fail, and masks that are made up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from helpers.books import check_books
from minisgl.core import (
    Plan,
    StepOutcome,
    StepResult,
)
from minisgl.core.image import places_of
from minisgl.core.plan import Flight
from minisgl.core.req import Mask
from minisgl.kvcache import RadixPrefixCache
from minisgl.scheduler import Scheduler
from minisgl_bench.fakes import FakeExecutor


def fake_mask(output: Sequence[int]) -> Mask:
    """A mask of 50 tokens, a third of them, that depends on the whole output."""
    allowed = [(token + 5 * sum(output) + len(output)) % 3 == 0 for token in range(50)]
    return np.packbits(allowed + [False] * 14, bitorder="little").view(np.uint32)


class FakeMasker:
    """Mutable: it checks that the output of a call continues that of the call before."""

    def __init__(self) -> None:
        self._output: list[int] = []

    def mask(self, output: Sequence[int], drafts: Sequence[int] = ()) -> Mask:
        assert list(output[: len(self._output)]) == self._output
        self._output = list(output)
        for index, draft in enumerate(drafts):
            mask = fake_mask([*output, *drafts[:index]])
            assert int(mask[draft // 32]) >> draft % 32 & 1, "the mask before forbids it"
        return fake_mask([*output, *drafts])

    def forced(self, output: Sequence[int]) -> Sequence[int]:
        return ()


class CheckedScheduler(Scheduler):
    """Checks the books after every step."""

    def plan(self) -> Plan | None:
        plan = super().plan()
        check_books(self)
        if plan is not None:
            self.check_writes(plan)
            self.check_images(plan)
        return plan

    def check_images(self, plan: Plan) -> None:
        """No row ends inside of an image that is computed whole."""
        for row, images in plan.images:
            assert plan.starts[row] < plan.ends[row]
            for image in images:
                places = places_of(image)
                assert not (image.whole and places[0] < plan.ends[row] <= places[-1])

    def check_writes(self, plan: Plan) -> None:
        """No row writes a page that an earlier step has given to the prefix tree."""
        tree = self.requests.cache.prefix_cache
        if not isinstance(tree, RadixPrefixCache):
            return
        stored = dict(plan.stored)
        page_size = self.config.page_size
        written = set()
        rows = zip(plan.uids, plan.starts, plan.ends, strict=True)
        for row, (uid, start, end) in enumerate(rows):
            pages = self.requests.by_uid[uid].pages
            first = max(start, stored.get(row, 0)) // page_size
            written.update(pages[first : -(-end // page_size)])
        written.discard(-1)  # of a model without a full group
        for node in tree.nodes():
            assert node.step >= plan.step or written.isdisjoint(node.pages), "a page written twice"

    def commit(self, plan: Plan, outcome: StepOutcome) -> list:
        events = super().commit(plan, outcome)
        check_books(self)
        return events


class DamagedExecutor(FakeExecutor):
    """In some steps the logits of a row are not finite.

    damaged_steps: maps such a step to the row, which counts on from the last to the first.
    """

    def __init__(self, *, damaged_steps: dict[int, int], **options: Any) -> None:
        super().__init__(**options)
        self._damaged_steps = damaged_steps

    def launch(self, plan: Plan) -> Flight:
        flight = super().launch(plan)
        row = self._damaged_steps.get(plan.step)
        return flight if row is None else DamagedFlight(flight, row)


@dataclass(slots=True)
class DamagedFlight(Flight):
    flight: Flight
    row: int

    def sample_late(self, masks: Sequence[Mask]) -> None:
        self.flight.sample_late(masks)

    def wait(self) -> StepOutcome:
        outcome = self.flight.wait()
        if not isinstance(outcome, StepResult) or not outcome.next_ids:
            return outcome
        ids = outcome.next_ids[:]
        ids[self.row % len(ids)] = -1
        return replace(outcome, next_ids=ids)
