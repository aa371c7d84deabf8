"""What a prefix cache promises, whatever its shape."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from minisgl.core.req import IdArray


class BaseCacheHandle(ABC):
    """A position in a prefix cache: the first `num_tokens` tokens of some request.

    Valid while locked. `num_tokens` is a multiple of the page size.
    """

    num_tokens: int

    @abstractmethod
    def pages(self) -> list[int]:
        """The pages from the first token to this position."""


class BasePrefixCache(ABC):
    """Pages of computed prefixes, kept for whoever comes with the same tokens. Host integers only.

    A page belongs to the cache from the moment `insert` takes it until `evict` or `drop` gives it
    back; a locked page is not evicted.
    """

    page_size: int
    shares: bool
    """Whether two requests with one prefix can share it: False means that waiting is no use."""

    @property
    @abstractmethod
    def num_evictable(self) -> int:
        """Pages that nobody has locked."""

    @abstractmethod
    def match(self, ids: IdArray, namespace: str = "") -> BaseCacheHandle:
        """The longest prefix of `ids` that `namespace` has cached, in whole pages. Not locked."""

    @abstractmethod
    def num_cached(self, ids: IdArray, namespace: str = "") -> int:
        """The number of tokens that `match` would find. Changes nothing, the LRU order included."""

    @abstractmethod
    def num_common(self, a: IdArray, b: IdArray) -> int:
        """The number of leading tokens of `a` and `b` whose pages could be shared."""

    @abstractmethod
    def insert(
        self, handle: BaseCacheHandle, ids: IdArray, pages: list[int], step: int
    ) -> tuple[BaseCacheHandle, list[int]]:
        """Continue the prefix at `handle` by `ids` (whole pages) whose KV is in `pages`.

        `step` is the step that writes (or wrote) them. Returns the handle at the new end, not
        locked, and those of `pages` that the cache did not take because it holds the same
        tokens already: they stay with the caller.
        """

    @abstractmethod
    def lock(self, handle: BaseCacheHandle) -> None: ...

    @abstractmethod
    def unlock(self, handle: BaseCacheHandle) -> None: ...

    @abstractmethod
    def evict(self, count: int) -> list[int]:
        """Give back up to `count` unlocked pages, least recently used first."""

    @abstractmethod
    def drop(self, step: int) -> list[int]:
        """Give back every page inserted for `step` or a later one. None of them may be locked."""

    @abstractmethod
    def held_pages(self) -> Iterator[tuple[int, int]]:
        """(page, lock count) of every page held, for invariant checks."""
