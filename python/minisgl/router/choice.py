"""Where a request goes: to the replica where it costs least time.

::

    time until it can start + time to compute what is not cached     its first token
    + what the requests that are there slow its answer down          its others
    + time to compute what is not cached, for each of those          theirs

Cached tokens are not computed, so a session stays where its prefix is. Queued tokens have to be
computed first, so a hot prefix spreads as soon as the queue before it costs more than the prefix
saves. Nothing else makes requests stick. The second line keeps requests with a short common prefix
and long answers from running on one replica. The third is what all others pay when a prompt is
computed again: steps with its tokens are longer, and who waits behind it waits longer. With the
first line alone, a prompt leaves its prefix too soon (docs/decisions/0029-replicas.md).

Sources: Preble (Srivatsa et al., 2024) weighs a prefix against load in one cost; "The Power of Two
Choices in Randomized Load Balancing" (Mitzenmacher, 2001) is what the benchmark compares with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

UNKNOWN_RATE: Final = 1_000.0
"""Prompt tokens per second of a replica that has measured none: only ratios matter then."""


@dataclass(slots=True, kw_only=True)  # not frozen: made for each replica and choice
class Load:
    """What one replica has to do.

    queued_tokens: prompt tokens that it has to compute before a new request's.
    num_waiting, num_running, max_running: requests. num_free_pages: of `page_size` tokens.
    prefill_tokens_per_s, finished_per_s: as in `minisgl.message.replica.ReplicaState`.
    slowdown_s: by how much one more running request slows another's whole answer down.
    """

    queued_tokens: int = 0
    num_waiting: int = 0
    num_running: int = 0
    max_running: int = 256
    num_free_pages: int = 1 << 30
    page_size: int = 16
    prefill_tokens_per_s: float = 0.0
    finished_per_s: float = 0.0
    slowdown_s: float = 0.0

    @property
    def num_requests(self) -> int:
        return self.num_running + self.num_waiting


def expected_s(load: Load, num_tokens: int, num_cached: int) -> float:
    """Return the expected seconds to the first token of a prompt of `num_tokens`, of which
    `num_cached` are in the replica's cache.

    A replica whose places or pages are taken starts a request when others end.
    """
    num_new = max(num_tokens - num_cached, 1)  # the last token is always computed
    seconds = (load.queued_tokens + num_new) / (load.prefill_tokens_per_s or UNKNOWN_RATE)
    is_full = load.num_requests >= load.max_running
    if is_full or num_new > load.num_free_pages * load.page_size:
        end_s = (load.num_waiting + 1) / load.finished_per_s if load.finished_per_s else 0.0
        seconds = max(seconds, end_s)
    return seconds


def cost_s(load: Load, num_tokens: int, num_cached: int) -> float:
    """Return the seconds that a prompt waits for its first token, and by which it and the requests
    at the replica slow each other down."""
    num_new = max(num_tokens - num_cached, 1)
    compute_s = num_new / (load.prefill_tokens_per_s or UNKNOWN_RATE)
    mutual_s = load.num_requests * (load.slowdown_s + compute_s)
    return expected_s(load, num_tokens, num_cached) + mutual_s


def choose(loads: Sequence[Load], num_tokens: int, cached: Mapping[int, int]) -> int:
    """Return the index of the load whose replica takes a prompt at least cost.

    cached: by index, the prompt's tokens that are in the replica's cache; left out: none. Of
    replicas with equal costs, it is one with fewest requests; of these the first. Raises ValueError
    if there are no loads.
    """
    if not loads:
        raise ValueError("there is no replica to choose from")

    def cost(index: int) -> tuple[float, int]:
        load = loads[index]
        return cost_s(load, num_tokens, cached.get(index, 0)), load.num_requests

    return min(range(len(loads)), key=cost)
