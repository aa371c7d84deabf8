"""Cache groups: layers whose caches have the same lifetime.

All layers of a group share page ids, and with them an allocator, a page table and slots. The page
size in tokens is the same for all groups, so a position means the same page index in each::

    full         |== 0 ==|== 1 ==|== 2 ==|== 3 ==|- - -|     every page of [0, end)
    window       |       |       |== 2 ==|== 3 ==|- - -|     pages of the last `window` tokens
    state                                |=S=|               the newest state
    rows                                     |- - -|         the tokens since the newest state
    position     0                               start  end

A window page is freed as soon as no later query sees it. A state page holds the state of a
recurrent layer after the last token of its page index. It is written once, and exists only at page
indices that end at a multiple of `interval`. Rows pages hold the layer's keys and updates for the
tokens after the newest state. The state and these rows together give the state after any token
(docs/decisions/0024).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from minisgl.errors import ConfigError

STATE_TOKENS = 512
"""The memory plan expects one state page per this many tokens of running requests."""
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

    def first_page(self, position: int, page_size: int) -> int:
        """Return the lowest page index that a query at `position`, or a later one, reads."""
        if self.kind == "full":
            return 0
        if self.kind == "window":
            return max(position - self.window + 1, 0) // page_size
        since = self.newest(position) // page_size
        return since if self.kind == "rows" else max(since - 1, 0)

    def newest(self, position: int) -> int:
        """Return the last multiple of the interval up to `position`."""
        return position // self.interval * self.interval

    def takes_page(self, index: int, end: int, page_size: int) -> bool:
        """Return whether a row that computes up to `end` needs page `index`, which begins below
        `end`."""
        if not self.interval:
            return True
        page_end = (index + 1) * page_size
        if self.kind == "rows":
            return page_end > self.newest(end)
        # The newest state that the row writes, or the next one, which a later row writes.
        return page_end % self.interval == 0 and page_end >= self.newest(end)

    def most_pages(self, num_tokens: int, chunk: int, page_size: int) -> int:
        """Return the most pages that a request of `num_tokens` holds at once, if a step computes at
        most `chunk` of them."""
        if self.kind == "state":
            return min(3, num_tokens // self.interval + 1)  # read, written, and the next one
        pages = -(-num_tokens // page_size)
        if self.kind == "rows":  # those that a chunk reads, and those that it writes
            return min(pages, 2 * self.interval // page_size)
        if self.kind == "window":
            pages = min(pages, -(-(self.window + chunk) // page_size) + 1)
        return pages

    def pool_pages(
        self, num_pages: int, running: int, chunk: int, page_size: int, saved_every: int
    ) -> int:
        """Return how many pages the group needs so that a full group of `num_pages` runs out first.

        running: the most running requests. chunk: the most prompt tokens of a step. saved_every:
        the tokens of the full group for each saved state of a state group.
        """
        if self.kind == "full":
            return num_pages
        tokens = num_pages * page_size
        held = min(tokens // STATE_TOKENS, 2 * running)  # at most 2 states a request
        if self.kind == "state":
            return held + tokens // saved_every + 3
        if self.kind == "rows":  # for the requests that hold these states, 1.5 states each
            running = min(running, 2 * held // 3 + 1)
            return min(num_pages, (running + 1) * self.interval // page_size)
        each = -(-self.window // page_size) + 2
        return min(num_pages, running * each + -(-chunk // page_size))

    def most_tokens(self, chunk: int, page_size: int) -> int | None:
        """Return the most tokens of a request that fits the group's pages when it runs alone; None
        if any length fits. Raises ConfigError if none fits.
        """
        any_length = 1 << 40
        if self.most_pages(any_length, chunk, page_size) <= self.num_pages:
            return None
        if self.interval:
            least = self.most_pages(any_length, chunk, page_size)
            raise ConfigError(
                f"a {self.kind} group needs at least {least} pages, got {self.num_pages}"
            )
        return self.num_pages * page_size


FULL = CacheGroup()
