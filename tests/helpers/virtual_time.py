"""An event loop whose clock stands still while code runs, for exact times on any machine."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its clock also replaces the module `time` of code under test. Mutable: the clock."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        return self.now

    perf_counter = time


class _JumpingSelector(selectors.DefaultSelector):
    """Lets the clock jump to the next timer when nothing more arrives."""

    ARRIVES_S = 0.005
    """Loopback delivers data before `send` returns, or soon after on a busy machine."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        if not timeout:
            return super().select(timeout)
        if not (events := super().select(self.ARRIVES_S)):
            self._loop.now += timeout
        return events


def run_virtually(loop: VirtualLoop, main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(main)
