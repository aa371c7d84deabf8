"""Cache groups: layers whose caches have the same lifetime.

All layers of a group share page ids, and with them an allocator, a page table and slots. The page
size in tokens is the same for all groups, so a position means the same page index in each::

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

from dataclasses import dataclass
from typing import Literal

from minisgl.errors import ConfigError

REQUEST_TOKENS = 2048
"""Tokens of a running request on average, by which the memory plan counts how many fit the full
group. If no request can be as long, it counts by the longest."""
GroupKind = Literal["full", "window", "state", "rows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """window: the number of keys that a query of a window group sees, its own included. interval:
    the number of tokens between two states, a multiple of the page size; 0 for groups without
    states. num_pages: the pages of the group's pool, 0 until memory is planned.
    """

    kind: GroupKind = "full"
    window: int = 0
    interval: int = 0
    num_pages: int = 0

    def newest(self, position: int) -> int:
        """Return the last multiple of the interval up to `position`."""
        return position // self.interval * self.interval

    def held_pages(self, phase: int, page_size: int) -> int:
        """Return the pages that a decoding request holds in a step. phase: the step's end, modulo
        the interval. Pages that the step frees count, because others may take pages before."""
        if self.kind == "state":
            return 2 if phase <= 1 else 1
        return self.interval // page_size if phase <= 1 else -(-phase // page_size)

    def most_pages(self, num_tokens: int, chunk: int, page_size: int) -> int:
        """Return the most pages that a request of `num_tokens` holds at once, if a step computes at
        most `chunk` of them."""
        if self.kind == "state":
            return min(2, num_tokens // self.interval)  # read, and written
        pages = -(-num_tokens // page_size)
        if self.kind == "rows":  # those that a chunk reads, and those that it writes
            return min(pages, 2 * self.interval // page_size)
        if self.kind == "window":
            pages = min(pages, -(-(self.window + chunk) // page_size) + 1)
        return pages

    def pool_pages(
        self,
        num_pages: int,
        running: int,
        longest: int,
        chunk: int,
        page_size: int,
        num_saved: int,
    ) -> int:
        """Return how many pages the group gets beside a full group of `num_pages`: enough that the
        full group runs out first, if running requests have `REQUEST_TOKENS` or more on average.

        running: the most running requests. longest: the most tokens of a request. chunk: the most
        prompt tokens of a step. num_saved: the states that the prefix tree can save. Shorter
        requests take their pages, so there are rows for as many more requests.
        """
        if self.kind == "full":
            return num_pages
        tokens = num_pages * page_size
        expected = min(running, tokens // min(REQUEST_TOKENS, longest) + 1)
        if self.kind == "state":  # an eighth of the requests can write one in the same step
            return expected + -(-expected // 8) + num_saved + 2
        if self.kind == "rows":  # a request has half an interval and half a page, on average
            each = self.interval // page_size
            with_states = min(running, expected + num_saved)
            return min(num_pages, with_states * each * 3 // 4 + 2 * each)
        each = -(-self.window // page_size) + 2
        # At least half as many tokens of short requests fit as in the full group.
        held = min(running * each, max(expected * each, num_pages // 2))
        return min(num_pages, held + -(-chunk // page_size))

    def most_tokens(self, chunk: int, page_size: int) -> int | None:
        """Return the most tokens of a request that fits the group's pages when it runs alone; None
        if any length fits. Raises ConfigError for a state group that cannot hold the state that a
        step reads beside the one that it writes.
        """
        any_length = 1 << 40
        if (least := self.most_pages(any_length, chunk, page_size)) <= self.num_pages:
            return None
        if self.kind == "state":
            raise ConfigError(f"a state group needs at least {least} pages, got {self.num_pages}")
        return self.num_pages * page_size


FULL = CacheGroup()
