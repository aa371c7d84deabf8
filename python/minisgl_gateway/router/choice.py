"""Chooses the replica where a request costs least time.

The cost of a request at a replica is the sum of three times::

    until its first token: the queue, and the tokens of its prompt that are not cached
    + the delay of its answer by the replica's other requests
    + the delay of those requests by the tokens of its prompt that are not cached

Cached tokens are not computed, so a session stays where its prefix is. Queued tokens are computed
first, so a common prefix spreads to more replicas as soon as its queue costs more than the prefix
saves. Nothing else ties requests to a replica. The second term spreads requests with a short common
prefix and long answers. The third counts what a prompt that is computed again costs the others:
steps with its tokens are longer, and requests behind it wait longer. With the first term alone, a
prompt leaves its prefix too soon (docs/decisions/0029-replicas.md).

Source: Preble (Srivatsa et al., 2024) weighs a prefix against load in one cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

UNKNOWN_RATE: Final = 1_000.0
"""A replica that has measured no rate counts with this one (prompt tokens a second), because its
cost must be comparable with the others'."""


@dataclass(slots=True, kw_only=True)  # not frozen: frozen ones take longer to make
class Load:
    """The load of one replica.

    queued_tokens: prompt tokens that it computes before those of a new request.
    num_waiting, num_running, max_running: requests. num_free_pages: pages of `page_size` tokens.
    prefill_tokens_per_s, finished_per_s: as in `minisgl_gateway.router.replica_state.ReplicaState`.
    slowdown_s: by how much one more running request delays the whole answer of another.
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
    """Return the expected seconds until the first token.

    num_tokens: of the prompt. num_cached: those in the replica's cache. A replica without a free
    place, or without pages for the prompt, starts it when other requests end.
    """
    num_new = max(num_tokens - num_cached, 1)  # the last token is always computed
    seconds = (load.queued_tokens + num_new) / (load.prefill_tokens_per_s or UNKNOWN_RATE)
    is_full = load.num_requests >= load.max_running
    if is_full or num_new > load.num_free_pages * load.page_size:
        end_s = (load.num_waiting + 1) / load.finished_per_s if load.finished_per_s else 0.0
        seconds = max(seconds, end_s)
    return seconds


def cost_s(load: Load, num_tokens: int, num_cached: int) -> float:
    """Return the cost that the module's docstring defines, in seconds."""
    num_new = max(num_tokens - num_cached, 1)
    compute_s = num_new / (load.prefill_tokens_per_s or UNKNOWN_RATE)
    mutual_s = load.num_requests * (load.slowdown_s + compute_s)
    return expected_s(load, num_tokens, num_cached) + mutual_s


def choose(loads: Sequence[Load], num_tokens: int, cached: Mapping[int, int]) -> int:
    """Return the index of the replica where a prompt costs least.

    loads: of the replicas, at least one. cached: by index, the prompt's tokens in the replica's
    cache; 0 if an index is missing. Among equal costs the fewest requests win, then the lowest
    index.
    """

    def cost(index: int) -> tuple[float, int]:
        load = loads[index]
        return cost_s(load, num_tokens, cached.get(index, 0)), load.num_requests

    return min(range(len(loads)), key=cost)
