"""Makes the FastAPI application of all routes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Final

from fastapi import Response
from starlette.types import ASGIApp

from minisgl.errors import EngineError
from minisgl.server import body, errors
from minisgl.server.api import chat, completions, generate, models, tokens
from minisgl.server.api.models import ServedModel
from minisgl.server.bodies import Bodies
from minisgl.server.browser_guard import Door, behind
from minisgl.server.errors import Draining, Restarting
from minisgl.server.frontend import Frontend
from minisgl.server.openapi import DocumentedAPI
from minisgl.server.request_ids import RequestIds
from minisgl.server.telemetry import metrics
from minisgl_gateway import page
from minisgl_gateway.anthropic import routes as anthropic
from minisgl_gateway.keys.guard import KeyGuard
from minisgl_gateway.keys.ring import KeyRing
from minisgl_gateway.ollama import models as ollama_models
from minisgl_gateway.ollama import routes as ollama
from minisgl_gateway.responses import routes as responses
from minisgl_gateway.watch import profile, replica
from minisgl_gateway.watch import xray_route as xray

READY_TIMEOUT_S: Final = 0.8
"""A probe of Kubernetes waits 1 s by default."""


def _no_answer() -> str:
    return f"no answer from the workers within {READY_TIMEOUT_S:g} s"


def create_app(
    frontend: Frontend,
    model: ServedModel,
    stalled: Callable[[], str | None] = _no_answer,
    keys: KeyRing | None = None,
    door: Door | None = None,
) -> ASGIApp:
    """Return the application.

    stalled: called if a ping does not come back from the workers in time, as during a long step. It
    returns what is wrong, or None if all workers make progress. keys: the API keys; with None every
    client may use the server. door: for web pages of other origins and for names; None is `Door()`.
    """
    families = (
        *(chat, completions, generate, models, tokens, responses),
        *(anthropic, ollama, ollama_models),
    )
    records = [record for family in families for record in family.RECORDS]
    settings: Any = {"docs_url": None, "redoc_url": None, "redirect_slashes": False}
    app = DocumentedAPI(records, title="Mini-SGLang", **settings)
    app.state.bodies, open_ids = Bodies(), Counter[str]()
    errors.install(app, frontend.observer)
    for family in families:
        app.include_router(family.router(frontend, model))
    app.include_router(metrics.router(frontend, model, keys))
    app.include_router(profile.router(frontend))
    app.include_router(xray.router(frontend))
    app.include_router(replica.router(frontend, model, keys, open_ids))
    app.include_router(page.router())

    @app.get("/health")
    async def health() -> Response:
        """Whether the server's processes are alive, or are starting again."""
        if frontend.failure and not isinstance(frontend.failure, Restarting):
            raise frontend.failure
        return body.response({"status": "ok"})

    @app.get("/ready")
    async def ready() -> Response:
        """Whether the loops of all processes make progress.

        While requests are open, the answer has oldest_token_age_s: the longest time of an open
        request since its last token, or since its arrival if it has none.
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
        answer: dict[str, Any] = {"status": "ready"}
        if frontend.num_open:
            answer["oldest_token_age_s"] = round(frontend.observer.oldest_token_age_s, 3)
        return body.response(answer)

    guarded: ASGIApp = KeyGuard(app, keys, frontend.observer) if keys else app
    # Outside the guard of keys: a browser's preflight request has no key.
    guarded = behind(door or Door(), guarded, lambda: keys is not None, frontend.observer.answered)
    return RequestIds(guarded, open_ids)  # outermost: FastAPI's answer to a crash gets an id too
