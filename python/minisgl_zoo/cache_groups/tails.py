"""The pages of a window or state group that the prefix tree keeps, and which it loses first.

A window group loses the page that was released first. States save different amounts of work, so a
state group weighs them, by GreedyDual-Size-Frequency (Cherkasova, 1998) for pages of one size: a
page that is released gets the rank

    floor + tokens * uses

and the lowest rank is lost first; `floor` is the rank of the last page that was lost, so that pages
age. *tokens* counts the tokens that the request had computed when it wrote the state: the work that
the state saves. *uses* counts the requests that resumed there, and one more where a prompt ends or
prompts diverge, because later prompts rarely diverge elsewhere. (Marconi, Pan et al.,
MLSys 2025, also weighs states by the work that they save, and keeps those at such positions.)
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from minisgl.kvcache.manager import PageAllocator
from minisgl.kvcache.radix import _Node
from minisgl_zoo.cache_groups.groups import TailGroup

NO_PAGE = -1
MOST_USES = 4
"""The most uses that count, so that a prefix that was popular once is lost in the end."""


class NoPages(PageAllocator):
    """Stands for the full group of a model that has none: its pages take no memory."""

    def __init__(self) -> None:
        super().__init__(0)

    def allocate(self, count: int) -> list[int]:
        return [NO_PAGE] * count

    def free(self, pages: list[int]) -> None:
        pass


@dataclass(slots=True, eq=False)
class Entry:
    """A page of the tree. Mutable.

    step: the step that wrote it. saved: the work that it saves, in pages: those that the request
    which wrote it had computed up to its end. holders, uses: numbers of requests. rank: see the
    module; the second number is the time of its last release.
    """

    node: _Node
    step: int
    saved: int
    holders: int = 1
    uses: int = 0
    rank: tuple[int, int] = (0, 0)


class Tail:
    """The pages of one window, state or rows group. Mutable. `column` is its index in
    `_Node.tails`."""

    def __init__(self, index: int, column: int, group: TailGroup, page_size: int) -> None:
        self.index, self.column, self.group = index, column, group
        self._page_size = page_size
        self.allocator = PageAllocator(group.num_pages)
        self.entries: dict[int, Entry] = {}  # the tree's pages
        self.num_idle = 0  # those without holders
        self._heap: list[tuple[tuple[int, int], int, Entry]] = []  # idle pages, and outdated items
        self._floor = 0
        self._clock = 0

    @property
    def num_available(self) -> int:
        return self.allocator.num_free + self.num_idle

    @cached_property
    def _held_pages(self) -> npt.NDArray[np.float32]:
        """[t, p]: what a request of phase p holds t steps later (`CacheGroup.held_pages`)."""
        phases = range(interval := self.group.interval)
        held = [self.group.held_pages(phase, self._page_size) for phase in phases]
        return np.array([np.roll(held, -t) for t in range(interval)], dtype=np.float32)

    def peak(self, ends: Sequence[int]) -> int:
        """Return the most pages that decoding requests hold at once before any of them ends, if
        each step computes a token of each. ends: where their next steps end."""
        interval = self.group.interval
        counts = np.bincount(np.array(ends, np.int64) % interval, minlength=interval)
        return int((self._held_pages @ counts.astype(np.float32)).max())

    def hold(self, page: int) -> None:
        entry = self.entries[page]
        self.num_idle -= entry.holders == 0
        entry.holders += 1

    def let_go(self, page: int) -> None:
        """Note that a request no longer holds the page, which is its own or the tree's."""
        entry = self.entries.get(page)
        if entry is None:
            self.allocator.free([page])
            return
        entry.holders -= 1
        if entry.holders:
            return
        self.num_idle += 1
        self._clock += 1
        value = 0
        if self.group.kind == "state":
            node = entry.node
            ends = node.tails[self.column][-1] == page and len(node.children) != 1
            value = entry.saved * min(entry.uses + (ends or entry.uses > 1), MOST_USES)
        entry.rank = (self._floor + value, self._clock)
        if len(self._heap) > 2 * len(self.entries) + 64:
            self._heap = list(filter(self._is_idle, self._heap))
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (entry.rank, page, entry))

    def count_use(self, page: int) -> None:
        """A request computes on from the position at the end of this page of the tree."""
        self.entries[page].uses += 1

    def first_to_evict(self) -> int:
        """The idle page that the tree should lose next. There is one."""
        while not self._is_idle(item := heapq.heappop(self._heap)):
            pass
        (self._floor, _), page, _ = item
        return page

    def forget(self, page: int) -> None:
        """The tree has lost an idle page."""
        entry = self.entries.pop(page)
        assert entry.holders == 0, f"page {page} is lost while {entry.holders} requests hold it"
        self.num_idle -= 1
        self.allocator.free([page])

    def _is_idle(self, item: tuple[tuple[int, int], int, Entry]) -> bool:
        rank, page, entry = item
        return self.entries.get(page) is entry and not entry.holders and entry.rank == rank
