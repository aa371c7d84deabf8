"""The protocol of `CopySums` without GPUs: streams are queues, worked off in any legal order.

`begin` is the real one; the driver's calls put what they would do into the queue of their stream.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from minisgl.distributed import DistributedInfo, PendingSum, copies
from minisgl.distributed.copies import NUM_TURNS, CopySums

D, MAX_ROWS, STEPS = 8, 40, 12
WORD = 1 << 32


class Stream:
    """Work in order; a piece waits until it is ready."""

    def __init__(self, *_: object, **__: object) -> None:
        self.work: list[tuple[Callable[[], bool], Callable[[], object]]] = []
        self.cuda_stream = self

    def add(self, run: Callable[[], object], ready: Callable[[], bool] = lambda: True) -> None:
        self.work.append((ready, run))

    def wait_event(self, event: Event) -> None:
        self.add(lambda: None, lambda: event.done)

    def wait_stream(self, other: Stream) -> None:
        event = Event()
        event.record(other)
        self.wait_event(event)

    def can_go_on(self) -> bool:
        return bool(self.work) and self.work[0][0]()

    def go_on(self) -> None:
        self.work.pop(0)[1]()

    def synchronize(self) -> None:
        while self.work:
            assert self.can_go_on()
            self.go_on()


class Event:
    done = False

    def record(self, stream: Stream) -> None:
        stream.add(lambda: setattr(self, "done", True))


class Driver:
    """`minisgl.kernel.jit.CUDA` of one process, over host memory."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.memory: list[Tensor] = []

    def cubin_load(self, cubin: bytes) -> int:
        return 0

    def cubin_kernel(self, cubin: int, name: str) -> str:
        return name

    def memory_allocate(self, num_bytes: int, word: int) -> int:
        self.memory.append(torch.zeros(num_bytes, dtype=torch.uint8))
        return self.memory[-1].data_ptr()

    def memory_handle(self, address: int) -> bytes:
        return address.to_bytes(8, "little")

    def memory_open(self, handle: bytes) -> int:
        return int.from_bytes(handle, "little")

    def memory_copy(self, to: int, source: int, num_bytes: int, stream: Stream) -> None:
        half = num_bytes // 2  # others may come between
        stream.add(lambda: ctypes.memmove(to, source, half))
        stream.add(lambda: ctypes.memmove(to + half, source + half, num_bytes - half))

    def stream_write(self, address: int, word: int, stream: Stream) -> None:
        value = (word % WORD).to_bytes(4, "little")
        stream.add(lambda: ctypes.memmove(address, value, 4))

    def stream_wait(self, address: int, word: int, stream: Stream) -> None:
        def is_there() -> bool:
            there = int.from_bytes(ctypes.string_at(address, 4), "little")
            return (there - word) % WORD < WORD // 2

        stream.add(lambda: None, is_there)

    def kernel_launch(self, kernel: str, *arguments: Any) -> None:
        *_, parameters, dependent, stream = arguments
        assert kernel == "add_up_Float32"
        assert not dependent
        total, own, parts, packs, stride, rank = (
            ctypes.c_int64.from_address(at).value
            for at in (ctypes.c_int64 * 6).from_address(parameters)
        )

        def numbers(address: int) -> Any:
            return np.frombuffer((ctypes.c_char * (packs * 16)).from_address(address), np.float32)

        def add_up() -> None:
            of = [own if r == rank else parts + r * stride * 16 for r in range(self.size)]
            result = np.sum([numbers(address) for address in of], axis=0, dtype=np.float32)
            ctypes.memmove(total, result.ctypes.data, packs * 16)

        stream.add(add_up)


class Ranks:
    """All of them, each with a stream that computes."""

    def __init__(self, size: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """count: of the sums that were."""
        self.current: Stream | None = None
        monkeypatch.setattr(copies, "_cuda", SimpleNamespace(Stream=Stream, Event=Event))
        monkeypatch.setattr(copies, "all_reduce_cubin", lambda device, size: b"")
        monkeypatch.setattr(copies, "_DriverMemory", _seen_by_torch)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.current)
        self.copies = [
            CopySums(
                DistributedInfo(rank, size),
                torch.device("cpu"),
                Driver(size),
                max_rows=MAX_ROWS,
                row_bytes=4 * D,
            )
            for rank in range(size)
        ]
        for own in self.copies:
            own.connect([other.handle for other in self.copies])
            own._count = count
            words = np.full(NUM_TURNS * 2 * size, count % WORD, np.uint32)
            ctypes.memmove(own._memory, words.ctypes.data, words.nbytes)
        self.streams = [Stream() for _ in range(size)]

    def run(self, chance: random.Random) -> None:
        """All that was enqueued, in an order of chance; some streams are slow for a while."""
        streams = [*self.streams, *(own._stream for own in self.copies)]
        while any(stream.work for stream in streams):
            if chance.random() < 0.02:
                chance.shuffle(streams)
            ready = [stream for stream in streams if stream.can_go_on()]
            assert ready, "all wait for each other"
            ready[min(int(chance.expovariate(1)), len(ready) - 1)].go_on()


def _seen_by_torch(address: int, num_bytes: int) -> Any:
    return np.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), np.uint8)


class Checks:
    """Sums that were begun, and how many came out wrong."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.begun: list[tuple[list[PendingSum], list[Tensor], Tensor]] = []
        self.wrong = 0

    def begin(self, values: Tensor) -> None:
        """values: of each rank."""
        sums, parts = [], []
        for own, stream, value in zip(self.ranks.copies, self.ranks.streams, values, strict=True):
            part = torch.empty_like(value)
            stream.add(partial(part.copy_, value))
            self.ranks.current = stream
            sums.append(own.begin(part))
            parts.append(part)
        self.begun.append((sums, parts, values.sum(0)))

    def use_first(self) -> None:
        sums, parts, expected = self.begun.pop(0)
        for pending, part, stream in zip(sums, parts, self.ranks.streams, strict=True):
            self.ranks.current = stream
            stream.add(partial(self._check, pending.wait(), part, expected))

    def _check(self, total: Tensor, part: Tensor, expected: Tensor) -> None:
        self.wrong += not torch.equal(total, expected)
        part.fill_(777)  # it may be written now


@pytest.mark.parametrize("count", [0, WORD - 6], ids=["from 0", "words begin anew"])
@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_every_rank_has_the_sums(size: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(4):
        ranks = Ranks(size, count, monkeypatch)
        checks, plan = Checks(ranks), np.random.default_rng(seed)
        for turn in range(STEPS * NUM_TURNS):
            if turn >= NUM_TURNS:
                checks.use_first()
            rows = int(plan.integers(1, MAX_ROWS + 1))
            checks.begin(torch.from_numpy(plan.integers(-9, 9, (size, rows, D))).float())
        while checks.begun:
            checks.use_first()
        ranks.run(random.Random(seed))
        assert checks.wrong == 0


def test_a_stream_that_cannot_wait_is_told_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: Driver, address: int, word: int, stream: Stream) -> None:
        raise RuntimeError("cuStreamWaitValue32: operation not supported")

    monkeypatch.setattr(Driver, "stream_wait", refused)
    with pytest.raises(RuntimeError, match="not supported"):
        Ranks(2, 0, monkeypatch)
