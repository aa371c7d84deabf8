"""The KV cache: which pages exist and which requests may read them, and the tensors of the pages.

What it is for: `CacheManager` and the prefix caches count pages in host integers; `pool` holds the
tensors. What it does not know: the order of requests, what a step computes, attention. The host
half imports no torch; import `minisgl.kvcache.pool` for the tensors. Read next:
`minisgl.scheduler`.
"""

from minisgl.kvcache.base import BaseCacheHandle, BasePrefixCache
from minisgl.kvcache.manager import CacheManager, create_cache_manager, create_prefix_cache
from minisgl.kvcache.radix import RadixPrefixCache

__all__ = [
    "BaseCacheHandle",
    "BasePrefixCache",
    "CacheManager",
    "RadixPrefixCache",
    "create_cache_manager",
    "create_prefix_cache",
]
