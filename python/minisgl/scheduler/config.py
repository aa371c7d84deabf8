"""What the scheduler must know of the model, the pool and the user's limits."""

from __future__ import annotations

from dataclasses import dataclass

from minisgl.core.args import CacheKind
from minisgl.core.groups import CacheGroup
from minisgl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """num_pages: of the engine's KV pool, for a model with one full cache group. groups: the cache
    groups with their pages, instead of num_pages. page_size: in tokens, of all groups. max_seq_len:
    prompt and output tokens of one request at most. max_prefill_tokens: prompt tokens computed in
    one step at most; decodes come on top. max_stalling_tokens: the same while more requests are
    stalled by it than gain from it (see `minisgl.scheduler.budget`); None is as many. eos_ids: end-
    of-sequence tokens of the model. max_queued: waiting requests at most, None for no limit.
    watermark_tokens: growth, per running request, that must still have room after an admission;
    without it a full pool admits a request only to retract it at the next page boundary. `python -m
    benchmarks watermark` compares: 8 to 32 cost least, of which 32 retracts least.
    """

    num_pages: int = 0
    page_size: int
    max_seq_len: int
    vocab_size: int
    eos_ids: frozenset[int]
    max_prefill_tokens: int
    max_stalling_tokens: int | None = None
    max_running: int = 256
    max_queued: int | None = None
    cache: CacheKind = "radix"
    watermark_tokens: int = 32
    groups: tuple[CacheGroup, ...] = ()

    def __post_init__(self) -> None:
        if (self.num_pages > 0) == bool(self.groups):
            raise ConfigError(
                f"num_pages and groups both size the cache: give one, got {self.num_pages} and "
                f"{len(self.groups)} groups"
            )
        for name in ("page_size", "max_seq_len", "max_prefill_tokens", "max_running"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_stalling_tokens is not None and self.max_stalling_tokens < 1:
            raise ConfigError(
                f"max_stalling_tokens must be at least 1 or None, got {self.max_stalling_tokens}"
            )
        _ = self.num_pool_tokens  # raises ConfigError for a group that no request fits

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        return self.groups or (CacheGroup(num_pages=self.num_pages),)

    @property
    def num_pool_tokens(self) -> int:
        """Tokens of the longest request that fits the pools when it runs alone."""
        limits = (
            group.most_tokens(self.max_prefill_tokens, self.page_size)
            for group in self.cache_groups
        )
        return min((limit for limit in limits if limit is not None), default=self.max_seq_len)
