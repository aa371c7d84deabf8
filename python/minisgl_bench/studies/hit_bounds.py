"""Hit rates of prefix caches that know the future, a part of it, or only the law of reuse."""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence

import numpy as np

from minisgl.core.req import IdArray


def prefixes(ids: IdArray, block: int) -> list[int]:
    """Return an identifier of the prompt up to the end of each whole block before the last
    token."""
    keys, key = [], 0
    for end in range(block, len(ids), block):
        key = hash((key, ids[end - block : end].tobytes()))
        keys.append(key)
    return keys


class Oracle:
    """A cache that knows the future. It holds KV in blocks, and states exactly where a later
    request resumes. It keeps only entries that are needed again, and gives up first the one that is
    needed last (Belady, 1966), of several the one at the end of a prompt. Mutable.

    block: tokens of a block. kv_bytes: bytes of a token. state_bytes: bytes of a state; 0 for a
    dense model. running: the number of last requests that also take the bytes of their blocks
    without a later use, and of two states.
    """

    def __init__(
        self,
        prompts: Sequence[IdArray],
        *,
        block: int,
        kv_bytes: int,
        state_bytes: int,
        running: int,
    ) -> None:
        self._block = block
        self._sizes = {"block": block * kv_bytes, "state": state_bytes}
        self._running = running
        self._num_tokens = sum(map(len, prompts))
        self._paths = [prefixes(ids, block) for ids in prompts]

    def _uses(self) -> dict[tuple[str, int], list[int]]:
        """Return the numbers of the requests that need each block or state, the last first."""
        uses: dict[tuple[str, int], list[int]] = {}
        seen: set[int] = set()
        for number, path in enumerate(self._paths):
            depth = next((i for i, key in enumerate(path) if key not in seen), len(path))
            for key in path[:depth]:
                uses.setdefault(("block", key), []).append(number)
            if depth:
                uses.setdefault(("state", path[depth - 1]), []).append(number)
            seen.update(path)
        for numbers in uses.values():
            numbers.reverse()
        return uses

    def served(self, budget: int) -> float:
        """Return the share of prompt tokens that are not computed with a budget of so many
        bytes."""
        uses = self._uses()
        held: dict[tuple[str, int], int] = {}  # to the request that needs it next
        by_need: list[tuple[int, int, tuple[str, int]]] = []
        running: deque[int] = deque(maxlen=self._running)
        used = num_served = 0
        for number, path in enumerate(self._paths):
            depth = next((i for i, k in enumerate(path) if ("block", k) not in held), len(path))
            while depth and ("state", path[depth - 1]) not in held:
                depth -= 1
            num_served += depth * self._block
            for at, item in (
                (at, (kind, key)) for at, key in enumerate(path) for kind in self._sizes
            ):
                later = uses.get(item, [])
                while later and later[-1] <= number:
                    later.pop()
                if held.pop(item, None) is not None:
                    used -= self._sizes[item[0]]
                if later:
                    used += self._sizes[item[0]]
                    held[item] = later[-1]
                    heapq.heappush(by_need, (-later[-1], -at, item))
            only_running = sum(("block", key) not in held for key in path)
            running.append(only_running * self._sizes["block"] + 2 * self._sizes["state"])
            while by_need and used > budget - sum(running):
                need, _, item = heapq.heappop(by_need)
                if held.get(item) == -need:
                    del held[item]
                    used -= self._sizes[item[0]]
        return num_served / self._num_tokens


def knows_which(prompts: Sequence[IdArray], *, block: int, room: int) -> float:
    """Return the share of prompt tokens that a cache of `room` blocks serves. It knows whether a
    block is used again, but not when: of these blocks it loses the least recently used."""
    paths = [prefixes(ids, block) for ids in prompts]
    last = {key: number for number, path in enumerate(paths) for key in path}
    held: OrderedDict[int, None] = OrderedDict()
    num_served = 0
    for number, path in enumerate(paths):
        num_served += next((i for i, key in enumerate(path) if key not in held), len(path))
        for key in reversed(path):
            held.pop(key, None)
            if last[key] > number:
                held[key] = None
        while len(held) > room:
            held.popitem(last=False)
    return num_served * block / sum(map(len, prompts))


def without_future(prompts: Sequence[IdArray], *, block: int, kv_bytes: int, budget: int) -> float:
    """Return a bound on the share that a cache of KV serves without knowing the future.

    It knows the law of reuse: how often a block is used again after n requests, by the turn of the
    conversation that used it last. It keeps each block for the best time, so that it holds `budget`
    bytes on average. The law comes from these very prompts, so a real cache that knows nothing else
    serves less.
    """
    count = len(prompts)
    reused: dict[
        int, Counter[int]
    ] = {}  # by turn and number of requests: blocks used again after them
    unused: dict[int, Counter[int]] = {}  # the same: blocks not used again within them
    last: dict[int, int] = {}
    turns: list[int] = []
    paths = [prefixes(ids, block) for ids in prompts]
    for number, path in enumerate(paths):
        depth = next((i for i, key in enumerate(path) if key not in last), len(path))
        # A system prompt alone continues no conversation.
        turns.append(min(turns[last[path[depth - 1]]] + 1, 5) if depth > 1 else 0)
        for key in path:
            if key in last:
                turn = turns[last[key]]
                reused.setdefault(turn, Counter())[number - last[key]] += 1
            last[key] = number
    for number in last.values():
        unused.setdefault(turns[number], Counter())[count - number] += 1
    curves = []
    for turn in unused:
        hits, ends = np.zeros(count + 1), np.zeros(count + 1)
        for gap, blocks in reused.get(turn, Counter()).items():
            hits[gap] += blocks
            ends[gap] += blocks
        for gap, blocks in unused[turn].items():
            ends[gap] += blocks
        kept = ends.sum() - np.concatenate([[0], np.cumsum(ends)[:-1]])  # in the n-th request
        kept[0] = 0
        curves.append((np.cumsum(hits), np.cumsum(kept)))
    room = budget / (block * kv_bytes) * count
    prices = np.concatenate([[0], np.geomspace(1e-6, 1, 400)])
    best = min(
        price * room + sum(float((hits - price * held).max()) for hits, held in curves)
        for price in prices
    )
    return float(best) * block / sum(map(len, prompts))
