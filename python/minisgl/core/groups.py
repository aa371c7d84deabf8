"""Cache groups: layers whose caches have the same lifetime.

All layers of a group share page ids, and with them an allocator, a page table and slots. The page
size in tokens is the same for all groups, so a position means the same page index in each. A full
group, which most models have alone, keeps every page of a request. `minisgl_zoo.cache_groups` has
groups that keep fewer: of windows and of states.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

REQUEST_TOKENS = 2048
"""Tokens of a running request on average, by which the memory plan counts how many fit the full
group. If no request can be as long, it counts by the longest."""
GroupKind = Literal["full", "window", "state", "rows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """A full group. A subclass is a group of another kind."""

    kind: GroupKind = field(default="full", init=False)
    window: int = 0  # keys that a query of a window group sees, its own included
    interval: int = 0
    """The tokens between two states, a multiple of the page size; 0 for groups without states."""
    num_pages: int = 0  # of the group's pool; 0 until memory is planned

    def newest(self, position: int) -> int:
        """Return the last multiple of the interval up to `position`."""
        return position // self.interval * self.interval

    def held_pages(self, phase: int, page_size: int) -> int:
        """Return the pages of a group with an interval that a decoding request holds in a step.
        phase: the step's end, modulo the interval. Pages that the step frees count, because others
        may take pages before."""
        raise AssertionError("this group has no interval")

    def most_pages(self, num_tokens: int, chunk: int, page_size: int) -> int:
        """Return the most pages that a request of `num_tokens` holds at once, if a step computes at
        most `chunk` of them."""
        return -(-num_tokens // page_size)

    def pool_pages(
        self, num_pages: int, running: int, longest: int, chunk: int, page_size: int, num_saved: int
    ) -> int:
        """Return how many pages the group gets beside a full group of `num_pages`: enough that the
        full group runs out first, if running requests have `REQUEST_TOKENS` or more on average.

        running: the most running requests. longest: the most tokens of a request. chunk: the most
        prompt tokens of a step. num_saved: the states that the prefix tree can save.
        """
        return num_pages

    def most_tokens(self, chunk: int, page_size: int) -> int | None:
        """Return the most tokens of a request that fits the group's pages when it runs alone; None
        if any length fits. Raises ConfigError for a state group that is too small for any."""
        any_length = 1 << 40
        fits = self.most_pages(any_length, chunk, page_size) <= self.num_pages
        return None if fits else self.num_pages * page_size


FULL = CacheGroup()
