"""The scheduler's settings: sizes of the model and the pool, and the user's limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from minisgl.core.args import CacheKind
from minisgl.core.groups import CacheGroup
from minisgl.errors import ConfigError

if TYPE_CHECKING:
    from minisgl.core.step_times import StepTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The scheduler's settings. Numbers are trusted: they come from checked options.

    num_pages: pages of the KV pool, for a model with one full cache group. groups: the cache groups
    with their pages, instead of num_pages. page_size: tokens per page, in all groups. max_seq_len:
    the most prompt and output tokens of one request. max_prefill_tokens: the most prompt tokens in
    one step; decode rows come on top. max_stall_s: how long the prompts of a step may delay its
    decode rows, as `step_times`, which it needs, predict it; None for no bound. eos_ids: the
    model's end-of-sequence tokens. max_queued: the most waiting requests, None for no limit.
    watermark_tokens: a request starts only if the pool then still has room for this many more
    tokens of each running request; otherwise a full pool would start a request and retract it at
    the next page boundary. drafters: rows of the table of this name; with any, there are
    step_times. num_slots: adapters that the device holds; 0 without adapters. is_encoder: a prompt
    is planned whole, shares nothing and is pooled; `max_prefill_tokens` is at least `max_seq_len`.
    num_labels: the numbers that an encoder's head gives, which `logit_ids` name.
    """

    num_pages: int = 0
    page_size: int
    max_seq_len: int
    vocab_size: int
    eos_ids: frozenset[int]
    max_prefill_tokens: int
    max_stall_s: float | None = None
    step_times: StepTimes | None = None
    max_running: int = 256
    max_queued: int | None = None
    cache: CacheKind = "radix"
    watermark_tokens: int = 32
    groups: tuple[CacheGroup, ...] = ()
    drafters: tuple[str, ...] = ()
    num_slots: int = 0
    is_encoder: bool = False
    num_labels: int = 0

    def __post_init__(self) -> None:
        if (self.num_pages > 0) == bool(self.groups):
            raise ConfigError(
                f"num_pages and groups both size the cache: give one, got {self.num_pages} and "
                f"{len(self.groups)} groups"
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
