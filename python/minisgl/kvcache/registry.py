"""`--cache` by name."""

from __future__ import annotations

from typing import get_args

from minisgl.core.args import CacheKind
from minisgl.errors import ConfigError
from minisgl.kernel.radix import load_common_prefix
from minisgl.kvcache.base import BasePrefixCache
from minisgl.kvcache.naive import NaivePrefixCache
from minisgl.kvcache.radix import RadixPrefixCache


def create_prefix_cache(kind: CacheKind, page_size: int) -> BasePrefixCache:
    """Raises ConfigError for a kind that is none."""
    if kind not in get_args(CacheKind):
        raise ConfigError(f"cache must be one of {', '.join(get_args(CacheKind))}, got {kind!r}")
    if kind == "radix":
        return RadixPrefixCache(page_size, load_common_prefix())
    return NaivePrefixCache(page_size)
