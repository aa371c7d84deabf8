"""`--cache naive`: no prefix cache. Every request computes its whole prompt."""

from __future__ import annotations

from minisgl.core.req import IdArray
from minisgl.kernel.radix import common_prefix_length
from minisgl.kvcache.radix import RadixPrefixCache


class NaivePrefixCache(RadixPrefixCache):
    """A tree that `CacheManager` gives no page: the baseline for measuring a prefix cache."""

    shares = False

    def __init__(self, page_size: int) -> None:
        super().__init__(page_size, common_prefix_length)

    def num_common(self, a: IdArray, b: IdArray) -> int:
        return 0
