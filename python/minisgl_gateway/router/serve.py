"""`minisgl route`: runs a router."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

from minisgl.runtime.signals import Signals
from minisgl.server.command import say
from minisgl.server.flags import Parser
from minisgl.utils.logger import get_logger
from minisgl.utils.text import counted
from minisgl_gateway.front import Front, FrontServer, add_serving, run_front
from minisgl_gateway.http import server_root
from minisgl_gateway.router.fleet import Fleet
from minisgl_gateway.router.proxy import RouterApp

logger = get_logger(__name__)

DEFAULT_PORT: Final = 1918
"""A server has 1919 by default, so both can run on one machine."""


def route_parser() -> Parser:
    """Return the parser of `minisgl route`."""
    parser = Parser(
        prog="minisgl route",
        description="Listen on one port for several servers of the same model. Each request goes "
        "to the one where it costs all requests the least time: by cached prefix, queue and "
        "running requests.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--replica", action="append", metavar="URL", required=True,
        help="a server (minisgl serve), such as http://10.0.0.5:1919; may be repeated. A server "
        "that is not up gets requests when it is",
    )  # fmt: skip
    add(
        "--api-key", metavar="KEY",
        help="a key of the servers with admin rights, with which the router asks them for their "
        "state (default: $MINISGL_ROUTE_KEY, or none). Clients send their own keys, which the "
        "servers check",
    )  # fmt: skip
    add_serving(
        parser, DEFAULT_PORT, what="router", pages="the servers' own pages",
        names="all if the servers have API keys, else none",
    )  # fmt: skip
    return parser


def route(argv: Sequence[str], began: float) -> int:
    """Run the router until it is asked to stop. Returns the exit code."""

    def serving(
        given: argparse.Namespace, front: Front, signals: Signals
    ) -> Coroutine[Any, Any, None]:
        key = given.api_key or os.environ.get("MINISGL_ROUTE_KEY")
        fleet = Fleet([server_root(url) for url in given.replica], key)
        return Router(fleet, front).serve(signals)

    return run_front("router", route_parser(), argv, serving)


class Router(FrontServer):
    """A running router. Mutable: it starts, drains and ends."""

    def __init__(self, fleet: Fleet, front: Front) -> None:
        app = RouterApp(fleet)
        super().__init__(app, app.behind(front.door), front)
        self._fleet, self._url = fleet, front.url

    async def serve(self, signals: Signals, on_started: Callable[[], None] | None = None) -> None:
        """Ask the servers for their state, then serve."""

        def on_ready() -> None:
            up, known = len(self._fleet.up), counted(len(self._fleet.replicas), "server")
            say(f"\nRouting {self._url} to {known}, of which {up} are up (Ctrl-C stops it)")
            if on_started:
                on_started()

        await self._fleet.start()
        for replica in self._fleet.replicas:
            if replica.down is not None:
                logger.warning("replica %s is down: %s", replica.name, replica.down)
        try:
            await super().serve(signals, on_ready)
        finally:
            self._fleet.close()
