"""GET /xray/events: a stream of the engine's steps, requests and pages, for the page's X-ray.

The data of each event is a `minisgl_gateway.watch.xray.Frame`. The engine makes frames only while
an X-ray is open (`Watchers`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final

from fastapi import APIRouter
from starlette.responses import StreamingResponse

from minisgl.message import WatchMsg
from minisgl.server.frontend import Frontend
from minisgl.server.site import Routes, Site

RENEW_S: Final = 1.0
LEASE_S: Final = 3.0
"""How long the engine makes frames after each request for them."""
MAX_BEHIND: Final = 20
"""The most frames kept for a slow reader. Older ones are dropped."""


class Watchers:
    """The open X-rays of a server. Mutable. If there are none, the engine makes no frames."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._queues: set[asyncio.Queue[bytes | None]] = set()
        self._renewal: asyncio.Task[None] | None = None

    def deliver(self, frame: bytes | None) -> None:
        """Give a frame to each X-ray. None ends them all: the server stops, or lost a worker."""
        for queue in self._queues:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(frame)

    async def watch(self) -> AsyncIterator[bytes]:
        """Yield frames until the server stops."""
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(MAX_BEHIND)
        self._queues.add(queue)
        if self._renewal is None:
            self._renewal = asyncio.create_task(self._renew())
        try:
            while (frame := await queue.get()) is not None:
                yield frame
        finally:
            self._queues.discard(queue)

    async def _renew(self) -> None:
        while self._queues and not self._frontend.failure:
            self._frontend.round_trips.tell(WatchMsg(seconds=LEASE_S))
            await asyncio.sleep(RENEW_S)
        self._renewal = None


def router(site: Site) -> APIRouter:
    frontend = site.frontend
    routes = APIRouter()
    watchers = Watchers(frontend)
    frontend.on_frame = watchers.deliver

    @routes.get("/xray/events")
    async def events() -> StreamingResponse:
        """The engine's steps, requests and pages as server-sent events, about ten a second."""
        if frontend.failure:
            raise frontend.failure

        async def stream() -> AsyncIterator[bytes]:
            yield b": the X-ray\n\n"  # sends the headers before the first frame
            async for frame in watchers.watch():
                yield b"data: " + frame + b"\n\n"

        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return StreamingResponse(stream(), media_type="text/event-stream", headers=headers)

    return routes


ROUTES: Final = Routes(router)
