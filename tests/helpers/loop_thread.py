"""An event loop in a thread of its own, for servers beside a test that is not asynchronous."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from typing import Generic, TypeVar

T = TypeVar("T")


class LoopThread(Generic[T]):
    """`with LoopThread(context) as value:` is `async with context as value:` in that loop.

    Mutable: it starts and ends.
    """

    def __init__(self, context: AbstractAsyncContextManager[T]) -> None:
        self._context = context
        self._entered: Future[T] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._hold()))

    async def _hold(self) -> None:
        self._loop, self._left = asyncio.get_running_loop(), asyncio.Event()
        clock, self._ahead = self._loop.time, 0.0

        def now() -> float:
            return clock() + self._ahead

        self._loop.time = now  # type: ignore[method-assign] # only the clock is ours
        async with self._context as value:
            self._entered.set_result(value)
            await self._left.wait()

    def call(self, action: Callable[..., object], *args: object) -> None:
        """Let the loop call `action`; do not wait for it."""
        self._loop.call_soon_threadsafe(action, *args)

    def pass_time(self, seconds: float) -> None:
        """Let the loop's clock jump, and wait until the timers that are due then have been called.
        A test that does so needs no timeout that a busy machine may miss."""
        passed = threading.Event()

        def jump() -> None:
            self._ahead += seconds
            self._loop.call_later(0, passed.set)

        self.call(jump)
        assert passed.wait(60)

    def __enter__(self) -> T:
        self._thread.start()
        return self._entered.result(60)

    def __exit__(self, *exc_info: object) -> None:
        self.call(self._left.set)
        self._thread.join(60)
        assert not self._thread.is_alive()
