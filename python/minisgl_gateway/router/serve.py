"""`minisgl route`: runs a router."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from minisgl.runtime.signals import Signals
from minisgl.server.address import bind, url_of
from minisgl.server.args import HOSTS, ORIGINS
from minisgl.server.command import run_serving, say
from minisgl.server.flags import Parser, flag_type
from minisgl.server.web.guards import Door, RequestIds, door_of
from minisgl.server.web.http import HttpServer
from minisgl.utils.http import server_root
from minisgl.utils.logger import get_logger
from minisgl_gateway.front import FrontServer, add_address, add_serving, flags_given
from minisgl_gateway.router.fleet import Fleet
from minisgl_gateway.router.proxy import RouterApp
from minisgl_gateway.tls import tls_context

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
    add_address(parser, DEFAULT_PORT)
    add(
        "--api-key", metavar="KEY",
        help="a key of the servers with admin rights, with which the router asks them for their "
        "state (default: $MINISGL_ROUTE_KEY, or none). Clients send their own keys, which the "
        "servers check",
    )  # fmt: skip
    add(
        "--cors-origin", type=flag_type(ORIGINS), metavar="ORIGIN",
        help="web pages of these origins, with commas between them, may use the servers from a "
        "browser; * is all (default: the servers' own pages)",
    )  # fmt: skip
    add(
        "--allowed-host", type=flag_type(HOSTS), metavar="NAME",
        help="names, with commas between them, by which clients ask for the router, besides "
        "localhost, IP addresses and --host; * is all (default: all if the servers have API keys, "
        "else none)",
    )  # fmt: skip
    add_serving(parser)
    return parser


def route(argv: Sequence[str], began: float) -> int:
    """Run the router until it is asked to stop. Returns the exit code."""
    parser = route_parser()
    given = flags_given(parser, argv)

    def serve(signals: Signals) -> int:
        tls = tls_context(given.ssl_certfile, given.ssl_keyfile)
        key = given.api_key or os.environ.get("MINISGL_ROUTE_KEY")
        fleet = Fleet([server_root(url) for url in given.replica], key)
        with bind(given.host, given.port) as bound:
            door = door_of(given.host, given.cors_origin, given.allowed_host)
            router = Router(fleet, bound, tls, given.drain_timeout, door)
            asyncio.run(router.serve(signals))
        return 0

    return run_serving("router", serve, level=given.log_level, log_format=given.log_format)


class Router(FrontServer):
    """A running router. Mutable: it starts, drains and ends."""

    def __init__(
        self,
        fleet: Fleet,
        bound: socket.socket,
        tls: ssl.SSLContext | None,
        drain_s: float,
        door: Door,
    ) -> None:
        self._fleet = fleet
        app = RouterApp(fleet)
        http = HttpServer(RequestIds(app.behind(door), Counter()), tls, per_connection=2)
        super().__init__(app, http, bound, drain_s)
        self._url = url_of(bound, "https" if tls else "http")

    async def serve(self, signals: Signals, on_started: Callable[[], None] | None = None) -> None:
        """Ask the servers for their state, then serve."""

        def on_ready() -> None:
            up, known = len(self._fleet.up), len(self._fleet.replicas)
            say(f"\nRouting {self._url} to {known} servers, of which {up} are up (Ctrl-C stops it)")
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
