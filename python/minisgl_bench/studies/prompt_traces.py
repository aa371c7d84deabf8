"""Prompts whose prefixes repeat as in a recorded trace, or as in five kinds of work made up here.

A prompt is made of blocks; equal block numbers get equal ids.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import numpy as np

from minisgl.core.req import IdArray
from minisgl_bench.workload import trace

VOCAB_SIZE: Final = 32_000
BLOCK: Final = 64  # tokens of a block; the recorded trace has blocks of 512
RECORDED_BLOCK: Final = 512


def recorded(path: Path, count: int) -> list[IdArray]:
    """Return the prompts of Mooncake's trace, whole blocks and one token more.

    The last block, which is not whole, is left out: if a later prompt continues it, the trace gives
    it another id there.
    """
    recording = trace(path, vocab_size=VOCAB_SIZE, count=count)
    prompts = [session.turns[0].ids for session in recording.sessions]
    ends = [len(ids) // RECORDED_BLOCK * RECORDED_BLOCK for ids in prompts]
    one = np.zeros(1, np.int32)
    return [np.concatenate([ids[:end], one]) for ids, end in zip(prompts, ends, strict=True)]


def _ids(blocks: list[int], length: int) -> IdArray:
    parts = [
        np.random.default_rng(block).integers(0, VOCAB_SIZE, length, dtype=np.int32)
        for block in blocks
    ]
    return np.concatenate([*parts, np.zeros(1, np.int32)])


class _Writer:
    """Writes prompts of new and old blocks. Mutable: the number of the next new block."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self._next = 0

    def text(self, median: float, spread: float = 0.8) -> list[int]:
        """Return new blocks, of a log-normal number of tokens."""
        tokens = min(median * math.exp(self.rng.gauss(0, spread)), 60_000)
        first, self._next = self._next, self._next + max(round(tokens / BLOCK), 1)
        return list(range(first, self._next))

    def sessions(
        self, open_now: int, start: Callable[[], Iterator[list[int]]]
    ) -> Iterator[list[int]]:
        """Yield the prompts of `open_now` sessions at a time; one that ends is replaced. The times
        between prompts of a session are exponential."""
        turns = [(self.rng.random(), number, start()) for number in range(open_now)]
        heapq.heapify(turns)
        while True:
            now, number, session = heapq.heappop(turns)
            prompt = next(session, None)
            if prompt is None:
                session = start()
                prompt = next(session)
            yield prompt
            heapq.heappush(turns, (now + self.rng.expovariate(1), number, session))


def chat(writer: _Writer, open_now: int = 300) -> Iterator[list[int]]:
    """Conversations of some four turns under six system prompts."""
    systems = [writer.text(800) for _ in range(6)]

    def session() -> Iterator[list[int]]:
        history = list(writer.rng.choice(systems))
        for _ in range(1 + int(writer.rng.expovariate(1 / 3.5))):
            history += writer.text(300)
            yield list(history)
            history += writer.text(400)

    return writer.sessions(open_now, session)


def systems(writer: _Writer) -> Iterator[list[int]]:
    """200 long system prompts of unequal popularity, each time with another short question."""
    prompts = [writer.text(3000, 0.7) for _ in range(200)]
    weights = [1 / rank for rank in range(1, 201)]
    while True:
        yield writer.rng.choices(prompts, weights)[0] + writer.text(500)


def agents(writer: _Writer) -> Iterator[list[int]]:
    """40 agents, each of which appends the output of a tool some 30 times."""
    tools = [writer.text(6000, 0) for _ in range(3)]

    def session() -> Iterator[list[int]]:
        history = writer.rng.choice(tools) + writer.text(2000)
        for _ in range(5 + int(writer.rng.expovariate(1 / 25))):
            yield list(history)
            history += writer.text(700, 1.0)

    return writer.sessions(40, session)


def documents(writer: _Writer) -> Iterator[list[int]]:
    """One system prompt, one of 600 documents of unequal popularity, and a question."""
    system = writer.text(700, 0)
    pages = [writer.text(5000, 0.6) for _ in range(600)]
    weights = [rank**-0.8 for rank in range(1, 601)]
    while True:
        yield system + writer.rng.choices(pages, weights)[0] + writer.text(150)


def scans(writer: _Writer) -> Iterator[list[int]]:
    """Conversations; after each 300 prompts of them, 100 documents that are read once."""
    prompts = chat(writer, 120)
    while True:
        for _ in range(300):
            yield next(prompts)
        for _ in range(100):
            yield writer.text(12_000, 0.5)


MADE_UP: Final = {kind.__name__: kind for kind in (chat, systems, agents, documents, scans)}


def made_up(name: str, count: int) -> list[IdArray]:
    prompts = MADE_UP[name](_Writer(seed=1))
    return [_ids(next(prompts), BLOCK) for _ in range(count)]
