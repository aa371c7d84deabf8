"""Chooses the prefix cache by `--cache`, and its manager by the model's cache groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from minisgl import plugins
from minisgl.core.args import CacheKind
from minisgl.core.groups import CacheGroup
from minisgl.errors import ConfigError
from minisgl.kernel.radix import load_common_prefix
from minisgl.kvcache.base import BasePrefixCache
from minisgl.kvcache.manager import CacheManager
from minisgl.kvcache.naive import NaivePrefixCache
from minisgl.kvcache.radix import RadixPrefixCache


def create_prefix_cache(kind: CacheKind, page_size: int) -> BasePrefixCache:
    """Return the prefix cache of this kind. Raises ConfigError for an unknown kind."""
    if kind not in get_args(CacheKind):
        raise ConfigError(f"cache must be one of {', '.join(get_args(CacheKind))}, got {kind!r}")
    if kind == "radix":
        return RadixPrefixCache(page_size, load_common_prefix())
    return NaivePrefixCache(page_size)


def create_cache_manager(
    groups: Sequence[CacheGroup], kind: CacheKind, page_size: int, chunk: int
) -> CacheManager:
    """Return the cache manager for these groups. chunk: the most prompt tokens in a step."""
    if len(groups) == 1 and groups[0].kind == "full":
        return CacheManager(groups[0].num_pages, create_prefix_cache(kind, page_size))
    make = plugins.need("cache_groups", "manager", "a model with windows or states")
    manager: CacheManager = make(groups, kind, page_size, chunk)
    return manager
