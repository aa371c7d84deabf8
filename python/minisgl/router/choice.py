"""Chooses the replica where a request costs least time.

The cost is a sum of three lines::

    the time until its first token: the queue, and the tokens of its prompt that are not cached
    + the delay of its answer by the requests that are there
    + the delay of each of those by the tokens of its prompt that are not cached

Cached tokens are not computed, so a session stays where its prefix is. Queued tokens are computed
first, so a prefix that many requests have spreads as soon as its queue costs more than the prefix
saves. Nothing else ties requests to a replica. The second line spreads requests with a short common
prefix and long answers. The third counts what a prompt that is computed again costs the others:
steps with its tokens are longer, and requests behind it wait longer. With the first line alone, a
prompt leaves its prefix too soon (docs/decisions/0029-replicas.md).

Sources: Preble (Srivatsa et al., 2024) weighs a prefix against load in one cost; "The Power of Two
Choices in Randomized Load Balancing" (Mitzenmacher, 2001) is what the benchmark compares with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

UNKNOWN_RATE: Final = 1_000.0
"""Prompt tokens per second of a replica that has measured no rate."""


@dataclass(slots=True, kw_only=True)  # not frozen: made for each replica and choice
class Load:
    """The load of one replica.

    queued_tokens: prompt tokens that it computes before those of a new request.
    num_waiting, num_running, max_running: requests. num_free_pages: of `page_size` tokens.
    prefill_tokens_per_s, finished_per_s: as in `minisgl.message.replica.ReplicaState`.
    slowdown_s: the delay of one request's whole answer by one more running request.
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

    A replica without a free place, or without pages for the prompt, starts it when others end.
    """
    num_new = max(num_tokens - num_cached, 1)  # the last token is always computed
    seconds = (load.queued_tokens + num_new) / (load.prefill_tokens_per_s or UNKNOWN_RATE)
    is_full = load.num_requests >= load.max_running
    if is_full or num_new > load.num_free_pages * load.page_size:
        end_s = (load.num_waiting + 1) / load.finished_per_s if load.finished_per_s else 0.0
        seconds = max(seconds, end_s)
    return seconds


def cost_s(load: Load, num_tokens: int, num_cached: int) -> float:
    """Return the cost of the module's docstring, in seconds."""
    num_new = max(num_tokens - num_cached, 1)
    compute_s = num_new / (load.prefill_tokens_per_s or UNKNOWN_RATE)
    mutual_s = load.num_requests * (load.slowdown_s + compute_s)
    return expected_s(load, num_tokens, num_cached) + mutual_s


def choose(loads: Sequence[Load], num_tokens: int, cached: Mapping[int, int]) -> int:
    """Return the index of the load whose replica takes a prompt at least cost.

    cached: the prompt's tokens that are in the replica's cache, by index; 0 if an index is missing.
    Among equal costs the fewest requests win, then the lowest index. Raises ValueError if there are
    no loads.
    """
    if not loads:
        raise ValueError("there is no replica to choose from")

    def cost(index: int) -> tuple[float, int]:
        load = loads[index]
        return cost_s(load, num_tokens, cached.get(index, 0)), load.num_requests

    return min(range(len(loads)), key=cost)
