"""`minisgl gateway`: Messages, Responses and Ollama's API before a server of OpenAI's API."""

from __future__ import annotations

import argparse
import os
from collections.abc import Coroutine, Sequence
from typing import Any, Final

from fastapi import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from minisgl.runtime.signals import Signals
from minisgl.server.args import SECONDS, listed
from minisgl.server.command import say
from minisgl.server.errors import Draining
from minisgl.server.flags import Parser, flag_type
from minisgl.server.observe import Observer
from minisgl.server.site import DocumentedAPI
from minisgl.server.web import body, errors
from minisgl.server.web.guards import Door, behind
from minisgl_gateway.anthropic import routes as anthropic
from minisgl_gateway.chat import Chat
from minisgl_gateway.front import Front, FrontServer, add_serving, run_front
from minisgl_gateway.ollama import models as ollama_models
from minisgl_gateway.ollama import routes as ollama
from minisgl_gateway.responses import routes as responses
from minisgl_gateway.upstream.chat import UpstreamChat
from minisgl_gateway.upstream.reading import SILENT_S

DEFAULT_PORT: Final = 1917


def gateway_parser() -> Parser:
    """Return the parser of `minisgl gateway`."""
    parser = Parser(
        prog="minisgl gateway",
        description="Serve Anthropic's Messages, OpenAI's Responses and Ollama's API, and ask a "
        "server of OpenAI's chat completions for the answers.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--upstream", metavar="URL", required=True,
        help="the server, such as http://10.0.0.5:8000; its paths begin with /v1, or with the "
        "path of the URL",
    )  # fmt: skip
    add(
        "--upstream-api-key", metavar="KEY",
        help="the upstream's key for all requests (default: $MINISGL_UPSTREAM_API_KEY; without "
        "one, the upstream gets each client's own key)",
    )  # fmt: skip
    add(
        "--upstream-fields", type=listed, default=(), metavar="NAMES",
        help="fields, with commas between them, that the upstream takes beside OpenAI's, such as "
        "top_k,min_p (default: all if it is minisgl serve, else none)",
    )  # fmt: skip
    add(
        "--upstream-timeout", type=flag_type(SECONDS), default=SILENT_S, metavar="S",
        help="seconds for which the upstream may send nothing (default: %(default)s)",
    )  # fmt: skip
    add_serving(parser, DEFAULT_PORT, what="gateway")
    return parser


def gateway(argv: Sequence[str], began: float) -> int:
    """Run the gateway until it is asked to stop. Returns the exit code."""

    def serving(
        given: argparse.Namespace, front: Front, signals: Signals
    ) -> Coroutine[Any, Any, None]:
        key = given.upstream_api_key or os.environ.get("MINISGL_UPSTREAM_API_KEY")
        chat = UpstreamChat(given.upstream, key, given.upstream_fields, given.upstream_timeout)
        app = GatewayApp(chat, front.door)
        ready = f"\nGateway {front.url} to {chat.name} (Ctrl-C stops it)"
        return FrontServer(app, app, front).serve(signals, lambda: say(ready))

    return run_front("gateway", gateway_parser(), argv, serving)


class GatewayApp:
    """The doors, as an ASGI application over any `Chat`. Mutable: it counts open requests.
    is_draining: it refuses new ones."""

    def __init__(self, chat: Chat, door: Door) -> None:
        doors = (anthropic, responses, ollama, ollama_models)
        records = [record for each in doors for record in each.ROUTES.records]
        settings: Any = {"docs_url": None, "redoc_url": None, "redirect_slashes": False}
        app = DocumentedAPI(records, title="Mini-SGLang's gateway", **settings)
        app.state.bodies = body.Bodies()
        observer = Observer()
        errors.install(app, observer)
        for each in doors:
            app.include_router(each.router(chat))

        @app.get("/health")
        async def health() -> Response:
            """Whether the gateway is alive. It does not ask the upstream."""
            return body.response({"status": "ok"})

        @app.get("/docs", include_in_schema=False)
        async def docs() -> Response:
            """All paths, as /openapi.json."""
            return body.response(app.openapi())

        self._app: ASGIApp = behind(door, app, lambda: False, observer.answered)
        self.is_draining = False
        self.num_open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_open += 1
        try:
            app = (
                errors.error_response(Draining(), scope["path"]) if self.is_draining else self._app
            )
            await app(scope, receive, send)
        finally:
            self.num_open -= 1
