"""Makes the FastAPI application of all routes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Final

from fastapi import Response
from starlette.types import ASGIApp

from minisgl import plugins
from minisgl.errors import EngineError
from minisgl.server.clients import Keys
from minisgl.server.errors import Draining
from minisgl.server.frontend import Frontend
from minisgl.server.model import ServedModel
from minisgl.server.site import DocumentedAPI, Routes, Site
from minisgl.server.web import body, errors
from minisgl.server.web.guards import Door, RequestIds, behind
from minisgl.version import __version__

READY_TIMEOUT_S: Final = 0.8
"""A probe of Kubernetes waits 1 s by default."""


def create_app(
    frontend: Frontend,
    model: ServedModel,
    stalled: Callable[[], str | None] = lambda: f"no answer from workers in {READY_TIMEOUT_S:g} s",
    keys: Keys | None = None,
    door: Door | None = None,
) -> ASGIApp:
    """Return the application.

    stalled: called if a ping does not come back from the workers in time, as during a long step. It
    returns what is wrong, or None if all workers make progress. keys: the API keys; with None every
    client may use the server. door: which web pages may ask, and by which names; None is `Door()`.
    """
    found: list[Routes] = [row.load() for row in plugins.rows("routes")]
    records = [record for routes in found for record in routes.records]
    settings: Any = {"docs_url": None, "redoc_url": None, "redirect_slashes": False}
    app = DocumentedAPI(records, title="Mini-SGLang", version=__version__, **settings)
    app.state.bodies, open_ids = body.Bodies(), Counter[str]()
    app.state.by_header = {row.name: row.load() for row in plugins.rows("request_headers")}
    app.state.adapters = model.adapters
    errors.install(app, frontend.observer)
    site = Site(frontend=frontend, model=model, keys=keys, open_ids=open_ids)
    for routes in found:
        app.include_router(routes.router(site))

    @app.get("/health")
    async def health() -> Response:
        """Whether the server's processes are alive, or are starting again."""
        if frontend.failure and not frontend.failure.is_passing:
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

    guarded: ASGIApp = app
    if keys:
        guarded = plugins.need("keys", "guard", "--api-key")(app, keys, frontend.observer)
    # Outside the guard of keys: a browser's preflight request has no key.
    guarded = behind(door or Door(), guarded, lambda: keys is not None, frontend.observer.answered)
    return RequestIds(guarded, open_ids)  # outermost: FastAPI's answer to a crash gets an id too
