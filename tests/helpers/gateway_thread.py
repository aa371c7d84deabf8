"""A gateway before an upstream, in a thread of its own; and an upstream of OpenAI's API alone."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from helpers.loop_thread import LoopThread
from minisgl.server.address import bind, listen, url_of
from minisgl.server.web.guards import Door, RequestIds
from minisgl.server.web.http import HttpServer
from minisgl_gateway.upstream.chat import UpstreamChat
from minisgl_gateway.upstream.reading import SILENT_S
from minisgl_gateway.upstream.serve import GatewayApp


class AppThread:
    """Serves an ASGI application. Mutable: it starts and ends."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._bound = bind("127.0.0.1", 0)
        self.url = url_of(self._bound)
        self._thread = LoopThread(self._serving())

    @asynccontextmanager
    async def _serving(self) -> AsyncIterator[None]:
        http = HttpServer(self._app)
        listen(self._bound)
        started = asyncio.Event()
        serving = asyncio.create_task(http.serve_on(self._bound, started.set))
        await started.wait()
        yield
        http.should_exit = True
        await serving

    def __enter__(self) -> AppThread:
        self._thread.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._thread.__exit__()
        self._bound.close()


def gateway_before(
    url: str, key: str | None = None, further: Collection[str] = (), door: Door | None = None,
    silent_s: float = SILENT_S,
) -> AppThread:  # fmt: skip
    chat = UpstreamChat(url, key, further, silent_s)
    return AppThread(RequestIds(GatewayApp(chat, door or Door()), Counter()))


Answer = Callable[[dict[str, Any]], Response]


class PlainUpstream(AppThread):
    """Speaks OpenAI's chat completions and nothing else. Mutable: `received` has the requests'
    bodies, `headers` the last request's headers."""

    def __init__(self, answer: Answer) -> None:
        self.received: list[dict[str, Any]] = []
        self.headers: dict[str, str] = {}

        async def chat(request: Request) -> Response:
            self.headers = dict(request.headers)
            self.received.append(await request.json())
            return answer(self.received[-1])

        async def models(request: Request) -> Response:
            entry = {"id": "plain", "object": "model", "created": 5, "owned_by": "someone"}
            return JSONResponse({"object": "list", "data": [entry]})

        routes = [
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/models", models),
        ]
        super().__init__(Starlette(routes=routes))


def streamed(*lines: str) -> Response:
    """Return a stream of these lines, each in a write of its own."""
    return streamed_from(iter(lines))


def streamed_from(lines: Iterator[str]) -> Response:
    async def body() -> AsyncIterator[str]:
        for line in lines:
            yield line
            await asyncio.sleep(0)

    return StreamingResponse(body(), media_type="text/event-stream")
