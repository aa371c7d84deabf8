"""`--cache naive`: no prefix cache. Every request computes its whole prompt."""

from __future__ import annotations

from minisgl.core.req import IdArray
from minisgl.kvcache.base import BaseCacheHandle, BasePrefixCache


class _Nothing(BaseCacheHandle):
    num_tokens = 0

    def pages(self) -> list[int]:
        return []


class NaivePrefixCache(BasePrefixCache):
    """Holds no pages: the baseline for measuring a prefix cache."""

    shares = False
    num_evictable = 0

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._nothing = _Nothing()

    def match(self, ids: IdArray, namespace: str = "") -> BaseCacheHandle:
        return self._nothing

    def num_cached(self, ids: IdArray, namespace: str = "") -> int:
        return 0

    def differs_at(self, ids: IdArray, namespace: str = "") -> int | None:
        return None

    def num_common(self, a: IdArray, b: IdArray) -> int:
        return 0

    def insert(
        self, handle: BaseCacheHandle, ids: IdArray, pages: list[int], step: int
    ) -> tuple[BaseCacheHandle, list[int]]:
        return handle, pages

    def lock(self, handle: BaseCacheHandle) -> None:
        pass

    def unlock(self, handle: BaseCacheHandle) -> None:
        pass

    def evict(self, count: int) -> list[int]:
        return []

    def drop(self, step: int) -> list[int]:
        return []
