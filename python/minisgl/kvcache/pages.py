"""The free pages of a cache group: a stack of ids.

A page holds the KV of `page_size` consecutive tokens in all layers of the group. The source of
paging is PagedAttention (Kwon et al., SOSP 2023).
"""

from __future__ import annotations


class PageAllocator:
    """The free pages among `num_pages`. Mutable; the scheduler owns it. Not thread-safe."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages. At least so many are free."""
        assert count <= len(self._free), (count, len(self._free))
        if count == 1:
            return [self._free.pop()]
        split = len(self._free) - count
        taken = self._free[split:]
        del self._free[split:]
        return taken

    def free(self, pages: list[int]) -> None:
        self._free.extend(pages)
