"""`minisgl route`: runs a router.

SIGTERM lets open requests finish, for `--drain-timeout`; Ctrl-C and a second signal end them.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, get_args

from minisgl.runtime.signals import Signals
from minisgl.server.address import bind, listen, tls_context, url_of
from minisgl.server.args import HOSTS, ORIGINS, SECONDS, LogFormat, LogLevel
from minisgl.server.command import finish_open, run_serving, say
from minisgl.server.flags import Parser, flag_type, integer
from minisgl.server.web.guards import Door, RequestIds, door_of
from minisgl.server.web.http import HttpServer
from minisgl.utils.http import server_root
from minisgl.utils.logger import get_logger
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
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add(
        "--port", type=integer(0, 65535), default=DEFAULT_PORT, metavar="PORT",
        help="port to listen on; 0 for any free one (default: %(default)s)",
    )  # fmt: skip
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
    add("--ssl-certfile", metavar="FILE", help="serve HTTPS with this certificate (PEM)")
    add("--ssl-keyfile", metavar="FILE", help="the certificate's private key (PEM)")
    add(
        "--drain-timeout", type=flag_type(SECONDS), default=8.0, metavar="S",
        help="seconds for which SIGTERM lets open requests finish (default: %(default)s)",
    )  # fmt: skip
    add("--log-level", choices=get_args(LogLevel), help="what is logged (default: info)")
    add("--log-format", choices=get_args(LogFormat), help="the log's lines (default: text)")
    return parser


def route(argv: Sequence[str], began: float) -> int:
    """Run the router until it is asked to stop. Returns the exit code."""
    parser = route_parser()
    given = argparse.Namespace(**parser.parse_all(list(argv)))
    if given.ssl_keyfile and not given.ssl_certfile:
        parser.error("--ssl-keyfile needs --ssl-certfile, the certificate of the key")

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


class Router:
    """A running router. Mutable: it starts, drains and ends."""

    def __init__(
        self,
        fleet: Fleet,
        bound: socket.socket,
        tls: ssl.SSLContext | None,
        drain_s: float,
        door: Door,
    ) -> None:
        self._fleet, self._bound, self._tls, self._drain_s = fleet, bound, tls, drain_s
        self._app = RouterApp(fleet)
        app = RequestIds(self._app.behind(door), Counter())
        self._http = HttpServer(app, tls, per_connection=2)

    async def serve(self, signals: Signals, on_started: Callable[[], None] | None = None) -> None:
        """Serve until `end` is called, by a signal or otherwise. on_started: called when
        connections are accepted."""
        loop = asyncio.get_running_loop()

        def end() -> None:
            loop.call_soon_threadsafe(self.end, signals.number == signal.SIGTERM)

        def on_ready() -> None:
            signals.first = end
            url = url_of(self._bound, "https" if self._tls else "http")
            num_up, num_all = len(self._fleet.up), len(self._fleet.replicas)
            say(f"\nRouting {url} to {num_all} servers, of which {num_up} are up (Ctrl-C stops it)")
            if on_started:
                on_started()

        await self._fleet.start()
        for replica in self._fleet.replicas:
            if replica.down is not None:
                logger.warning("replica %s is down: %s", replica.name, replica.down)
        try:
            listen(self._bound)
            await self._http.serve_on(self._bound, on_ready)
        finally:
            self._fleet.close()

    def end(self, drain: bool) -> None:
        """Refuse new requests and let `serve` return. drain: first let open requests finish."""
        self._app.is_draining = True
        self._task = asyncio.create_task(self._end(self._drain_s if drain else 0.0))

    async def _end(self, drain_s: float) -> None:
        await finish_open(lambda: self._app.num_open, drain_s)
        self._http.should_exit = True
