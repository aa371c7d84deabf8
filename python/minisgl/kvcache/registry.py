"""`--cache` by name."""

from __future__ import annotations

from typing import Literal

from minisgl.kernel.radix import load_common_prefix
from minisgl.kvcache.base import BasePrefixCache
from minisgl.kvcache.naive import NaivePrefixCache
from minisgl.kvcache.radix import RadixPrefixCache

CacheKind = Literal["radix", "naive"]


def create_prefix_cache(kind: CacheKind, page_size: int) -> BasePrefixCache:
    if kind == "radix":
        return RadixPrefixCache(page_size, load_common_prefix())
    return NaivePrefixCache(page_size)
