"""Hit rates of known rules of eviction, beside an oracle that knows the future.

A simulation of equal blocks of KV, without a scheduler, running requests or states: only the blocks
that a rule keeps take room. A request touches the blocks of its prompt from the last to the first,
so a block counts as used later than the blocks behind it. Blocks are served up to the first one
that is missing.

The rules are written from their papers: ARC (Megiddo and Modha, FAST 2003), S3-FIFO (Yang et al.,
SOSP 2023), SIEVE (Zhang et al., NSDI 2024), LeCaR (Vietri et al., HotStorage 2018), and
GreedyDual-Size-Frequency (Cherkasova, 1998; here blocks have one size and one cost).
"""

from __future__ import annotations

import heapq
import math
import random
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

from minisgl.core.req import IdArray
from minisgl_bench.arguments import add_json, benchmark_parser, natural, naturals
from minisgl_bench.report import write_json
from minisgl_bench.studies.hit_bounds import Oracle, knows_which, prefixes, without_future
from minisgl_bench.studies.hybrid_hits import KV_BYTES
from minisgl_bench.studies.prompt_traces import RECORDED_BLOCK, recorded

Queue = OrderedDict[int, int]


class Rule(Protocol):
    """A cache that holds at most as many blocks as its constructor says. Mutable."""

    def __contains__(self, key: int) -> bool: ...

    def touch(self, key: int) -> None:
        """Use a block, which is cached from now on. Other blocks may be lost."""


class Lru:
    def __init__(self, room: int) -> None:
        self._room, self._queue = room, Queue()

    def __contains__(self, key: int) -> bool:
        return key in self._queue

    def touch(self, key: int) -> None:
        self._queue[key] = 0
        self._queue.move_to_end(key)
        if len(self._queue) > self._room:
            self._queue.popitem(last=False)


class Lfu:
    """Loses the least used block, of several the least recently used.

    ages: a new block starts with the rank of the last lost one (GreedyDual).
    """

    ages = False

    def __init__(self, room: int) -> None:
        self._room = room
        self._held: dict[int, tuple[int, int, int]] = {}  # rank, time, uses
        self._heap: list[tuple[int, int, int]] = []
        self._floor = self._clock = 0

    def __contains__(self, key: int) -> bool:
        return key in self._held

    def touch(self, key: int) -> None:
        self._clock += 1
        uses = self._held[key][2] + 1 if key in self._held else 1
        rank = self._floor + uses
        self._held[key] = rank, self._clock, uses
        heapq.heappush(self._heap, (rank, self._clock, key))
        while len(self._held) > self._room:
            rank, time, lost = heapq.heappop(self._heap)
            if self._held.get(lost, ())[:2] == (rank, time):
                del self._held[lost]
                self._floor = rank if self.ages else 0


class Gdsf(Lfu):
    ages = True


class Sieve:
    """A queue by age. A hand goes from old to young and spares the blocks used since its last
    pass."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._ahead, self._passed = Queue(), Queue()  # blocks before and behind the hand; 1: used

    def __contains__(self, key: int) -> bool:
        return key in self._ahead or key in self._passed

    def touch(self, key: int) -> None:
        for queue in (self._ahead, self._passed):
            if key in queue:
                queue[key] = 1
                return
        while len(self._ahead) + len(self._passed) >= self._room:
            if not self._ahead:
                self._ahead, self._passed = self._passed, self._ahead
            old, used = self._ahead.popitem(last=False)
            if not used:
                break
            self._passed[old] = 0
        self._ahead[key] = 0


class S3Fifo:
    """A small queue (a tenth of the room), a main queue, and the names of blocks that left the
    small one. A block reaches the main queue by a use in the small one, or by its return."""

    def __init__(self, room: int) -> None:
        self._room, self._small_room = room, max(room // 10, 1)
        self._small, self._main, self._ghost = Queue(), Queue(), Queue()

    def __contains__(self, key: int) -> bool:
        return key in self._small or key in self._main

    def touch(self, key: int) -> None:
        for queue in (self._small, self._main):
            if key in queue:
                queue[key] = min(queue[key] + 1, 3)
                return
        while len(self._small) + len(self._main) >= self._room:
            self._lose()
        target = self._main if self._ghost.pop(key, None) is not None else self._small
        target[key] = 0

    def _lose(self) -> None:
        if len(self._small) >= self._small_room or not self._main:
            key, uses = self._small.popitem(last=False)
            if uses > 1:
                self._main[key] = 0
                return
            self._ghost[key] = 0
            if len(self._ghost) > self._room:
                self._ghost.popitem(last=False)
            return
        key, uses = self._main.popitem(last=False)
        if uses:
            self._main[key] = uses - 1


class Arc:
    """Two lists by last use: blocks used once, and more often. The return of a lost block moves the
    border between them."""

    def __init__(self, room: int) -> None:
        self._room, self._target = room, 0.0
        self._once, self._often = Queue(), Queue()
        self._lost_once, self._lost_often = Queue(), Queue()

    def __contains__(self, key: int) -> bool:
        return key in self._once or key in self._often

    def touch(self, key: int) -> None:
        if key in self:
            self._once.pop(key, None)
            self._often[key] = 0
            self._often.move_to_end(key)
        elif key in self._lost_once:
            ratio = max(len(self._lost_often) / len(self._lost_once), 1)
            self._target = min(self._target + ratio, self._room)
            self._lose(False)
            del self._lost_once[key]
            self._often[key] = 0
        elif key in self._lost_often:
            ratio = max(len(self._lost_once) / len(self._lost_often), 1)
            self._target = max(self._target - ratio, 0)
            self._lose(True)
            del self._lost_often[key]
            self._often[key] = 0
        else:
            seen_once = len(self._once) + len(self._lost_once)
            seen = seen_once + len(self._often) + len(self._lost_often)
            if seen_once >= self._room:
                if len(self._once) < self._room:
                    self._lost_once.popitem(last=False)
                    self._lose(False)
                else:
                    self._once.popitem(last=False)
            elif seen >= self._room:
                if seen >= 2 * self._room:
                    self._lost_often.popitem(last=False)
                self._lose(False)
            self._once[key] = 0

    def _lose(self, was_often: bool) -> None:
        if len(self._once) + len(self._often) < self._room:
            return
        length = len(self._once)
        if length and (length > self._target or (was_often and length == self._target)):
            self._lost_once[self._once.popitem(last=False)[0]] = 0
        elif self._often:
            self._lost_often[self._often.popitem(last=False)[0]] = 0


class LeCaR:
    """Draws whether to lose a block by age or by uses. The return of a block lowers the chance of
    the rule that lost it."""

    RATE: Final = 0.45
    FORGET: Final = 0.005

    def __init__(self, room: int) -> None:
        self._room, self._clock, self._by_age = room, 0, 0.5
        self._queue = Queue()  # uses
        self._heap: list[tuple[int, int, int]] = []
        self._lost: tuple[Queue, Queue] = (Queue(), Queue())  # by age, by uses: when
        self._rng = random.Random(1)

    def __contains__(self, key: int) -> bool:
        return key in self._queue

    def touch(self, key: int) -> None:
        self._clock += 1
        for lost, sign in zip(self._lost, (-1, 1), strict=True):
            if key in lost:
                regret = self.FORGET ** ((self._clock - lost.pop(key)) / self._room)
                age = self._by_age * math.exp(sign * self.RATE * regret)
                self._by_age = age / (age + 1 - self._by_age)
        if key not in self._queue and len(self._queue) == self._room:
            self._lose(self._rng.random() >= self._by_age)
        self._queue[key] = self._queue.get(key, 0) + 1
        self._queue.move_to_end(key)
        heapq.heappush(self._heap, (self._queue[key], self._clock, key))

    def _lose(self, by_uses: bool) -> None:
        victim = next(iter(self._queue))
        while by_uses:
            uses, _, victim = heapq.heappop(self._heap)
            if self._queue.get(victim) == uses:
                break
        del self._queue[victim]
        names = self._lost[by_uses]
        names[victim] = self._clock
        if len(names) > self._room:
            names.popitem(last=False)


RULES: Final = (Lru, Lfu, Gdsf, Sieve, S3Fifo, Arc, LeCaR)


def main(argv: list[str]) -> None:
    parser = benchmark_parser(__name__, __doc__)
    parser.add_argument("--trace", type=Path, metavar="FILE", required=True, help="Mooncake's")
    parser.add_argument("--count", type=natural, default=2000, help="requests")
    parser.add_argument("--gb", type=naturals, default=[20, 60, 120], help="budgets, 10**9 bytes")
    add_json(parser)
    args = parser.parse_args(argv)
    prompts = recorded(args.trace, args.count)
    columns = [rule.__name__.lower() for rule in RULES] + ["no future", "which", "oracle"]
    print("   GB" + "".join(f"{column:>11}" for column in columns))
    rows = []
    for gb in args.gb:
        shares = measure(prompts, gb * 10**9)
        print(f"{gb:5}" + "".join(f"{share:11.4f}" for share in shares))
        row = {"name": f"{args.trace.stem}, {gb} GB", "gb": gb}
        rows.append({**row, "shares": [round(share, 4) for share in shares]})
    if args.json:
        write_json(args.json, {"count": args.count, "columns": columns, "rows": rows})


def measure(prompts: Sequence[IdArray], budget: int) -> list[float]:
    """Return the shares of prompt tokens that are not computed: with each of `RULES`, with a cache
    that knows the law of reuse, with one that knows which blocks are used again but not when, and
    with an oracle."""
    room = budget // (RECORDED_BLOCK * KV_BYTES)
    bound = without_future(prompts, block=RECORDED_BLOCK, kv_bytes=KV_BYTES, budget=budget)
    oracle = Oracle(
        prompts, block=RECORDED_BLOCK, kv_bytes=KV_BYTES, state_bytes=0, running=0
    ).served(budget)
    which = knows_which(prompts, block=RECORDED_BLOCK, room=room)
    return [*(served(prompts, rule(room)) for rule in RULES), bound, which, oracle]


def served(prompts: Sequence[IdArray], cache: Rule) -> float:
    num_served = 0
    for ids in prompts:
        path = prefixes(ids, RECORDED_BLOCK)
        num_served += next((i for i, key in enumerate(path) if key not in cache), len(path))
        for key in reversed(path):
            cache.touch(key)
    return num_served * RECORDED_BLOCK / sum(map(len, prompts))
