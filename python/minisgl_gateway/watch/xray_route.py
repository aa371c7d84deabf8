"""GET /xray/events: a stream of the engine's steps, requests and pages, for the page's X-ray.

The data of each event is a `minisgl_gateway.watch.xray.Frame`. The engine makes frames only while
an X-ray is open (`minisgl_gateway.watch.watchers`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

from fastapi import APIRouter
from starlette.responses import StreamingResponse

from minisgl.server.site import Routes, Site
from minisgl_gateway.watch.watchers import Watchers


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
