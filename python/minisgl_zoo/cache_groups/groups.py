"""The groups that keep fewer pages of a request than a full group::

    full         |== 0 ==|== 1 ==|== 2 ==|== 3 ==|- - -|     every page of [0, end)
    window       |       |       |== 2 ==|== 3 ==|- - -|     pages of the last `window` tokens
    state                                |=S=|               the newest state
    rows                                     |- - -|         the tokens since the newest state
    position     0                               start  end

A window page is freed as soon as no later query sees it. A state page holds the state of a
recurrent layer after the last token of its page index. It is written once, by the step that takes
it, and exists only at page indices that end at a multiple of `interval`. Rows pages hold the
layer's keys and updates for the tokens after the newest state. The state and these rows together
give the state after any token (docs/decisions/0024).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from minisgl.core.groups import REQUEST_TOKENS, CacheGroup, GroupKind
from minisgl.errors import ConfigError


class TailGroup(CacheGroup, ABC):
    """A group that needs only the pages near the last computed token."""

    __slots__ = ()

    @abstractmethod
    def first_page(self, position: int, page_size: int) -> int:
        """Return the lowest page index that a query at `position`, or a later one, reads."""

    @abstractmethod
    def new_pages(self, num_listed: int, start: int, end: int, page_size: int) -> range:
        """Return the page indices that a row which computes [start, end) takes. num_listed: the
        indices below it were considered by earlier rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowGroup(TailGroup):
    kind: GroupKind = field(default="window", init=False)

    def first_page(self, position: int, page_size: int) -> int:
        return max(position - self.window + 1, 0) // page_size

    def new_pages(self, num_listed: int, start: int, end: int, page_size: int) -> range:
        return range(num_listed, -(-end // page_size))

    def most_pages(self, num_tokens: int, chunk: int, page_size: int) -> int:
        return min(-(-num_tokens // page_size), -(-(self.window + chunk) // page_size) + 1)

    def pool_pages(
        self, num_pages: int, running: int, longest: int, chunk: int, page_size: int, num_saved: int
    ) -> int:
        expected = _expected(num_pages * page_size, running, longest)
        each = -(-self.window // page_size) + 2
        # At least half as many tokens of short requests fit as in the full group.
        held = min(running * each, max(expected * each, num_pages // 2))
        return min(num_pages, held + -(-chunk // page_size))


@dataclass(frozen=True, slots=True, kw_only=True)
class StateGroup(TailGroup):
    kind: GroupKind = field(default="state", init=False)

    def first_page(self, position: int, page_size: int) -> int:
        return max(self.newest(position) // page_size - 1, 0)

    def new_pages(self, num_listed: int, start: int, end: int, page_size: int) -> range:
        last = self.newest(end) // page_size
        return range(last - (self.newest(end) > start), last)

    def held_pages(self, phase: int, page_size: int) -> int:
        return 2 if phase <= 1 else 1

    def most_pages(self, num_tokens: int, chunk: int, page_size: int) -> int:
        return min(2, num_tokens // self.interval)  # read, and written

    def pool_pages(
        self, num_pages: int, running: int, longest: int, chunk: int, page_size: int, num_saved: int
    ) -> int:
        expected = _expected(num_pages * page_size, running, longest)
        # An eighth of the requests can write one in the same step.
        return expected + -(-expected // 8) + num_saved + 2

    def most_tokens(self, chunk: int, page_size: int) -> int | None:
        if self.num_pages < 2:  # the state that a step reads, and the one that it writes
            raise ConfigError(f"a state group needs at least 2 pages, got {self.num_pages}")
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsGroup(TailGroup):
    kind: GroupKind = field(default="rows", init=False)

    def first_page(self, position: int, page_size: int) -> int:
        return self.newest(position) // page_size

    def new_pages(self, num_listed: int, start: int, end: int, page_size: int) -> range:
        return range(max(self.newest(end) // page_size, num_listed), -(-end // page_size))

    def held_pages(self, phase: int, page_size: int) -> int:
        return self.interval // page_size if phase <= 1 else -(-phase // page_size)

    def most_pages(self, num_tokens: int, chunk: int, page_size: int) -> int:
        """Those that a chunk reads, and those that it writes."""
        return min(-(-num_tokens // page_size), 2 * self.interval // page_size)

    def pool_pages(
        self, num_pages: int, running: int, longest: int, chunk: int, page_size: int, num_saved: int
    ) -> int:
        """A request has half an interval and half a page, on average, and may have a whole one.
        Shorter requests take the pages of saved states, so there are rows for as many more
        requests."""
        expected = _expected(num_pages * page_size, running, longest)
        each = self.interval // page_size
        with_states = min(running, expected + num_saved)
        return max(min(num_pages, with_states * each * 3 // 4 + 2 * each), each)


GROUPS: Final[Mapping[str, type[CacheGroup]]] = {
    "full": CacheGroup,
    "window": WindowGroup,
    "state": StateGroup,
    "rows": RowsGroup,
}
"""The class of each kind."""


def _expected(num_tokens: int, running: int, longest: int) -> int:
    """Return the requests that a full group of so many tokens holds, at most `running`."""
    return min(running, num_tokens // min(REQUEST_TOKENS, longest) + 1)
