"""The FastAPI application: the API families, the two health checks, request ids, errors."""

from __future__ import annotations

import string
import uuid
from typing import Final

from fastapi import FastAPI, Response
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minisgl.errors import EngineError
from minisgl.server import errors, generate, models, openai_chat, openai_completions
from minisgl.server.frontend import Frontend
from minisgl.server.models import ServedModel
from minisgl.server.openapi import DocumentedAPI

# A step of the engine, which the ping has to wait for, aims at 0.3 s on a CPU.
READY_TIMEOUT_S: Final = 3.0


def create_app(frontend: Frontend, model: ServedModel) -> FastAPI:
    app = DocumentedAPI(title="Mini-SGLang", redoc_url=None)
    errors.install(app)
    app.add_middleware(RequestIds)
    app.include_router(openai_chat.router(frontend, model))
    app.include_router(openai_completions.router(frontend, model))
    app.include_router(generate.router(frontend, model))
    app.include_router(models.router(model))

    @app.get("/health")
    async def health() -> Response:
        """Whether every process of the server is alive."""
        if frontend.failure:
            raise frontend.failure
        return _status("ok")

    @app.get("/ready")
    async def ready() -> Response:
        """Whether the processes make progress: a message goes round all of them."""
        if not await frontend.ping(READY_TIMEOUT_S):
            error = frontend.failure or EngineError(
                f"no answer from the workers within {READY_TIMEOUT_S:g} s"
            )
            error.status = 503
            raise error
        return _status("ready")

    return app


def _status(word: str) -> Response:
    return Response(f'{{"status":"{word}"}}', media_type="application/json")


class RequestIds:
    """Gives each response an X-Request-Id: the request's own if that is decent, else a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _is_decent(given) else uuid.uuid4().hex

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


_DECENT: Final = frozenset(string.ascii_letters + string.digits + "-_.:/+=@")


def _is_decent(request_id: str) -> bool:
    return 0 < len(request_id) <= 128 and _DECENT.issuperset(request_id)
