"""Queues in which keys take turns, so that one client's work does not wait for all of another's,
and the share of a key in a queue that is full.

A key is anything that names a client. The items of a key keep their order.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

T = TypeVar("T")


def is_full(most: int, keys: Collection[Hashable], key: Hashable) -> bool:
    """Return whether a queue with items of `keys` takes no further one of `key`.

    Above `most` items a key may still add one if it has less than an equal share of `most`: the
    others cannot shut it out. So k keys have at most `most` * (1 + 1/2 + ... + 1/k) items.
    """
    if len(keys) < most:
        return False
    held = Counter(keys)
    return held[key] >= max(most // len(held), 1)


class TurnQueue(Generic[T]):
    """Mutable. The key that was served last comes last."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, deque[T]] = {}  # in the order of the next turns

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, key: Hashable, item: T) -> None:
        self._waiting.setdefault(key, deque()).append(item)

    def take(self, busy: Collection[Hashable] = ()) -> tuple[Hashable, T] | None:
        """Return the next item and its key, which is not one of `busy`; None if there is none."""
        for key in self._waiting:
            if key not in busy:
                items = self._waiting.pop(key)
                item = items.popleft()
                if items:
                    self._waiting[key] = items
                return key, item
        return None


class TurnThreads:
    """Threads that call functions, at most one of a key at a time. Mutable: it starts a thread with
    each of the first functions. Those that are not closed end with the process."""

    def __init__(self, name: str, num_threads: int = 1) -> None:
        self._name = name
        self._num_threads = num_threads
        self._threads: list[threading.Thread] = []
        self._changed = threading.Condition()
        self._queue: TurnQueue[tuple[Future[Any], Callable[[], Any]]] = TurnQueue()
        self._began: dict[Hashable, float] = {}  # by key, of functions that run
        self._is_closed = False

    def submit(self, key: Hashable, call: Callable[[], T]) -> Future[T]:
        """Let a thread call `call`."""
        future: Future[T] = Future()
        with self._changed:
            self._queue.put(key, (future, call))
            if len(self._threads) < self._num_threads:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._threads.append(thread)
                thread.start()
            self._changed.notify()
        return future

    def longest_s(self) -> float:
        """Return for how long the function runs that has run longest; 0 if none runs."""
        now = time.monotonic()
        return max((now - began for began in list(self._began.values())), default=0.0)

    def close(self, *, waits: bool = True) -> None:
        """End the threads. waits: until the functions that run return. The others are never
        called."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads if waits else ():
            thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._is_closed and not (found := self._queue.take(self._began)):
                    self._changed.wait()
                if self._is_closed:
                    return
                assert found
                key, (future, call) = found
                self._began[key] = time.monotonic()
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
            del future, call, found  # they may hold a long text
            with self._changed:
                del self._began[key]
                self._changed.notify_all()
