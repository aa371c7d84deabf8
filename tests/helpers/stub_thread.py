from __future__ import annotations

import asyncio
import threading

from benchmarks.stub import Script, StubServer


class StubThread:
    """A stub server in a thread of its own, for code that runs its own event loop."""

    def __init__(self, script: Script) -> None:
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(script)))
        self._thread.start()
        assert self._started.wait(60)

    async def _serve(self, script: Script) -> None:
        async with StubServer(script) as self.stub:
            self._loop = asyncio.get_running_loop()
            self._stop = asyncio.Event()
            self._started.set()
            await self._stop.wait()

    @property
    def url(self) -> str:
        return self.stub.url

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)
