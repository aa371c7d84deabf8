"""A router in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from helpers.loop_thread import LoopThread
from minisgl.runtime.signals import Signals
from minisgl.server.address import bind
from minisgl.server.web.guards import Door
from minisgl_gateway.front import Front
from minisgl_gateway.router.fleet import Fleet
from minisgl_gateway.router.serve import Router


class RouterThread:
    """Runs a router. Mutable: it starts and ends. fleet: its replicas. ended: set when `serve`
    has returned."""

    def __init__(
        self,
        urls: Sequence[str],
        key: str | None = None,
        drain_s: float = 5.0,
        door: Door | None = None,
    ) -> None:
        self.fleet = Fleet(urls, key)
        self._bound = bind("127.0.0.1", 0)
        front = Front(bound=self._bound, tls=None, door=door or Door(), drain_s=drain_s)
        self.url = front.url
        self._router = Router(self.fleet, front)
        self.ended = threading.Event()
        self._thread = LoopThread(self._serving())

    @asynccontextmanager
    async def _serving(self) -> AsyncIterator[None]:
        started = asyncio.Event()
        serving = asyncio.create_task(self._router.serve(Signals(), started.set))
        serving.add_done_callback(lambda _: self.ended.set())
        await started.wait()
        yield
        self._router.end(False)
        await serving

    def call(self, action: Callable[..., object], *args: object) -> None:
        """Let the router's thread call `action`; do not wait for it."""
        self._thread.call(action, *args)

    def drain(self) -> None:
        self.call(self._router.end, True)

    def __enter__(self) -> RouterThread:
        self._thread.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._thread.__exit__()
        self._bound.close()
