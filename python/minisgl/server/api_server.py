"""The FastAPI application: API families, page, metrics, two health checks, request ids, errors."""

from __future__ import annotations

import string
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Final

from fastapi import Response
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minisgl.errors import EngineError
from minisgl.server import errors, page
from minisgl.server.api import (
    anthropic,
    chat,
    completions,
    generate,
    models,
    ollama,
    ollama_models,
    responses,
    tokens,
)
from minisgl.server.api.models import ServedModel
from minisgl.server.errors import Draining, Restarting
from minisgl.server.frontend import Frontend
from minisgl.server.key_guard import KeyGuard
from minisgl.server.keys import KeyRing
from minisgl.server.openapi import DocumentedAPI
from minisgl.server.telemetry import metrics, profile, replica, xray
from minisgl.utils.logger import get_logger

logger = get_logger(__name__)

READY_TIMEOUT_S: Final = 0.8
"""A probe of Kubernetes waits 1 s by default."""


def _no_answer() -> str:
    return f"no answer from the workers within {READY_TIMEOUT_S:g} s"


def create_app(
    frontend: Frontend,
    model: ServedModel,
    stalled: Callable[[], str | None] = _no_answer,
    keys: KeyRing | None = None,
    origins: Sequence[str] = (),
) -> ASGIApp:
    """Return the application.

    stalled: called if a ping does not come back from the workers in time, as during a long step. It
    returns what is wrong, or None if all workers make progress. keys: without them, every client
    may use the server. origins: the web pages of other hosts that may use it (CORS), "*" for all.
    """
    families = (
        *(chat, completions, generate, models, tokens, responses),
        *(anthropic, ollama, ollama_models),
    )
    records = [record for family in families for record in family.RECORDS]
    settings: Any = {"docs_url": None, "redoc_url": None, "redirect_slashes": False}
    app = DocumentedAPI(records, title="Mini-SGLang", **settings)
    errors.install(app, frontend.observer)
    for family in families:
        app.include_router(family.router(frontend, model))
    app.include_router(metrics.router(frontend, model, keys))
    app.include_router(profile.router(frontend))
    app.include_router(xray.router(frontend))
    app.include_router(replica.router(frontend, model, keys))
    app.include_router(page.router())

    @app.get("/health")
    async def health() -> Response:
        """Whether the server's processes are alive, or start again."""
        if frontend.failure and not isinstance(frontend.failure, Restarting):
            raise frontend.failure
        return _status("ok")

    @app.get("/ready")
    async def ready() -> Response:
        """Whether the loops of all processes make progress.

        While requests are open, the answer has oldest_token_age_s: the seconds since the last token
        of the request that has waited longest for one (or since it came, if it has none yet).
        """
        if frontend.is_draining:
            raise Draining
        in_time = await frontend.round_trips.ping(READY_TIMEOUT_S)
        if frontend.failure:
            raise frontend.failure
        if not in_time and (reason := stalled()):
            error = EngineError(reason)
            error.status = 503
            raise error
        age_s = frontend.observer.oldest_token_age_s
        more = f',"oldest_token_age_s":{age_s:.3f}' if frontend.num_open else ""
        return _status("ready", more)

    guarded: ASGIApp = KeyGuard(app, keys, frontend.observer) if keys else app
    if origins:  # before the guard: a browser asks without a key whether it may ask
        guarded = CORSMiddleware(
            guarded,
            allow_origins=origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=("X-Request-Id", "Retry-After", "X-Minisgl-Warning"),
        )
    return RequestIds(guarded)  # outermost: FastAPI's answer to a crash gets an id, too


def _status(word: str, more: str = "") -> Response:
    return Response(f'{{"status":"{word}"{more}}}', media_type="application/json")


class RequestIds:
    """Gives each response an X-Request-Id: the request's own if it is valid, else a new one.

    Logs exceptions that FastAPI has answered and raises again: uvicorn would close the connection
    on them. Handles HEAD as GET, because uvicorn leaves the body out.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _is_valid(given) else uuid.uuid4().hex
        scope["request_id"] = request_id
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            logger.exception("request %s met a bug of the server", request_id)


_ID_CHARACTERS: Final = frozenset(string.ascii_letters + string.digits + "-_.:/+=@")


def _is_valid(request_id: str) -> bool:
    return 0 < len(request_id) <= 128 and _ID_CHARACTERS.issuperset(request_id)
