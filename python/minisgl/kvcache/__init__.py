"""The KV cache: which pages exist and who may read them (host), and the tensors themselves (pool).

What it is for: `CacheManager` and the prefix caches keep books in host integers; `pool` holds the
tensors. What it does not know: requests' order, steps' contents, attention. The host half imports
no torch; import `minisgl.kvcache.pool` for the tensors. Read next: `minisgl.scheduler`.
"""

from minisgl.kvcache.base import BaseCacheHandle, BasePrefixCache
from minisgl.kvcache.manager import CacheManager
from minisgl.kvcache.naive import NaivePrefixCache
from minisgl.kvcache.radix import RadixPrefixCache
from minisgl.kvcache.registry import create_cache_manager, create_prefix_cache

__all__ = [
    "BaseCacheHandle",
    "BasePrefixCache",
    "CacheManager",
    "NaivePrefixCache",
    "RadixPrefixCache",
    "create_cache_manager",
    "create_prefix_cache",
]
