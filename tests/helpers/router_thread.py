"""A router in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

from minisgl.router.fleet import Fleet
from minisgl.router.serve import Router
from minisgl.runtime.signals import Signals
from minisgl.server.address import bind, url_of


class RouterThread:
    """Runs a router. Mutable: it starts and ends. fleet: its replicas."""

    def __init__(self, urls: Sequence[str], key: str | None = None, drain_s: float = 5.0) -> None:
        self.fleet = Fleet(urls, key)
        self._bound = bind("127.0.0.1", 0)
        self.url = url_of(self._bound)
        self._router = Router(self.fleet, self._bound, None, drain_s)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._started = threading.Event()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._router.serve(Signals(), self._started.set)

    def __enter__(self) -> RouterThread:
        self._thread.start()
        assert self._started.wait(60)
        return self

    def end(self, *, drain: bool) -> None:
        self._loop.call_soon_threadsafe(self._router.end, drain)

    def __exit__(self, *exc_info: object) -> None:
        if self._thread.is_alive():
            self.end(drain=False)
        self._thread.join(60)
        assert not self._thread.is_alive()
        self._bound.close()
