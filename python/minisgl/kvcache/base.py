"""The protocol of a prefix cache."""

from __future__ import annotations

from abc import ABC, abstractmethod

from minisgl.core.req import IdArray


class BaseCacheHandle(ABC):
    """A position in a prefix cache: the end of the first `num_tokens` tokens of a request.

    Valid while locked. `num_tokens` is a multiple of the page size.
    """

    num_tokens: int

    @abstractmethod
    def pages(self) -> list[int]:
        """Return the pages from the first token to this position."""


class BasePrefixCache(ABC):
    """Keeps the pages of computed prefixes for later requests that start with the same tokens.

    Host integers only. A page belongs to the cache from `insert` until `evict` or `drop` returns
    it. A locked page is not evicted.
    """

    page_size: int
    shares: bool
    """Whether requests can share a prefix. If not, a request never waits for another's pages."""
    num_evictable: int
    """The number of pages that are not locked."""

    @abstractmethod
    def match(self, ids: IdArray, namespace: str = "") -> BaseCacheHandle:
        """Return the longest prefix of `ids`, in whole pages, of `namespace`. It is not locked."""

    @abstractmethod
    def num_cached(self, ids: IdArray, namespace: str = "") -> int:
        """Return the number of tokens that `match` would find. Does not change the LRU order."""

    @abstractmethod
    def differs_at(self, ids: IdArray, namespace: str = "") -> int | None:
        """Return the first position at which `ids` differ from the branch with the longest match.

        Returns None if they do not differ: the ids or the branch end there, or nothing is cached.
        """

    @abstractmethod
    def num_common(self, a: IdArray, b: IdArray) -> int:
        """Return how many leading tokens `a` and `b` have in common, in whole pages."""

    @abstractmethod
    def insert(
        self, handle: BaseCacheHandle, ids: IdArray, pages: list[int], step: int
    ) -> tuple[BaseCacheHandle, list[int]]:
        """Extend the prefix at `handle` by `ids`, whole pages whose KV is in `pages`.

        step: the step that writes the pages. Returns the handle of the new end, not locked, and the
        pages that the cache did not take because it has others for the same tokens. These stay with
        the caller.
        """

    @abstractmethod
    def lock(self, handle: BaseCacheHandle) -> None: ...

    @abstractmethod
    def unlock(self, handle: BaseCacheHandle) -> None: ...

    @abstractmethod
    def evict(self, count: int) -> list[int]:
        """Return up to `count` unlocked pages, the least recently used first."""

    @abstractmethod
    def drop(self, step: int) -> list[int]:
        """Return all pages that `step` or a later step writes. None of them may be locked."""
