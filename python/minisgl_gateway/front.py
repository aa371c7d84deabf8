"""A process before other servers: what `minisgl route` and `minisgl gateway` share.

SIGTERM lets open requests finish, for `--drain-timeout`; Ctrl-C and a second signal end them.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, get_args

from starlette.types import ASGIApp

from minisgl.runtime.signals import Signals
from minisgl.server.address import bind, listen, url_of
from minisgl.server.args import HOSTS, ORIGINS, SECONDS, LogFormat, LogLevel
from minisgl.server.command import finish_open, run_serving
from minisgl.server.flags import Parser, flag_type, integer
from minisgl.server.web.guards import Door, RequestIds, door_of
from minisgl.server.web.http import HttpServer
from minisgl_gateway.leaving import end_open
from minisgl_gateway.tls import tls_context


def add_serving(
    parser: Parser, port: int, *, what: str, pages: str = "none", names: str = "none"
) -> None:
    """Add the flags of the address, its guards, TLS, draining and logging.

    port: the default. what: the parser is for. pages, names: which origins and names are allowed by
    default.
    """
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add(
        "--port", type=integer(0, 65535), default=port, metavar="PORT",
        help="port to listen on; 0 for any free one (default: %(default)s)",
    )  # fmt: skip
    add(
        "--cors-origin", type=flag_type(ORIGINS), metavar="ORIGIN",
        help=f"web pages of these origins, with commas between them, may use the {what} from a "
        f"browser; * is all (default: {pages})",
    )  # fmt: skip
    add(
        "--allowed-host", type=flag_type(HOSTS), metavar="NAME",
        help=f"names, with commas between them, by which clients ask for the {what}, besides "
        f"localhost, IP addresses and --host; * is all (default: {names})",
    )  # fmt: skip
    add("--ssl-certfile", metavar="FILE", help="serve HTTPS with this certificate (PEM)")
    add("--ssl-keyfile", metavar="FILE", help="the certificate's private key (PEM)")
    add(
        "--drain-timeout", type=flag_type(SECONDS), default=8.0, metavar="S",
        help="seconds for which SIGTERM lets open requests finish (default: %(default)s)",
    )  # fmt: skip
    add("--log-level", choices=get_args(LogLevel), help="what is logged (default: info)")
    add("--log-format", choices=get_args(LogFormat), help="the log's lines (default: text)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """What the flags of `add_serving` say. bound: to the address."""

    bound: socket.socket
    tls: ssl.SSLContext | None
    door: Door
    drain_s: float

    @property
    def url(self) -> str:
        return url_of(self.bound, "https" if self.tls else "http")


def run_front(
    what: str,
    parser: Parser,
    argv: Sequence[str],
    serving: Callable[[argparse.Namespace, Front, Signals], Coroutine[Any, Any, None]],
) -> int:
    """Run `serving` of the flags until a signal, and return the exit code. Exits with a message if
    a flag is wrong. what: the name of the process in its log."""
    given = argparse.Namespace(**parser.parse_all(list(argv)))
    if given.ssl_keyfile and not given.ssl_certfile:
        parser.error("--ssl-keyfile needs --ssl-certfile, the certificate of the key")

    def serve(signals: Signals) -> int:
        tls = tls_context(given.ssl_certfile, given.ssl_keyfile)
        with bind(given.host, given.port) as bound:
            door = door_of(given.host, given.cors_origin, given.allowed_host)
            front = Front(bound=bound, tls=tls, door=door, drain_s=given.drain_timeout)
            asyncio.run(serving(given, front, signals))
        return 0

    return run_serving(what, serve, level=given.log_level, log_format=given.log_format)


class FrontApp(Protocol):
    """What the process serves. is_draining: it refuses new requests. num_open: open requests."""

    is_draining: bool
    num_open: int


class FrontServer:
    """Serves until a signal. Mutable: it drains and ends."""

    def __init__(self, app: FrontApp, guarded: ASGIApp, front: Front) -> None:
        """guarded: the application behind its guards."""
        self._app, self._bound, self._drain_s = app, front.bound, front.drain_s
        self._http = HttpServer(RequestIds(guarded, Counter()), front.tls, per_connection=2)

    async def serve(self, signals: Signals, on_started: Callable[[], None]) -> None:
        """Serve until `end` is called, by a signal or otherwise. on_started: called when
        connections are accepted."""
        loop = asyncio.get_running_loop()

        def end() -> None:
            loop.call_soon_threadsafe(self.end, signals.number == signal.SIGTERM)

        def on_ready() -> None:
            signals.first = end
            on_started()

        listen(self._bound)
        await self._http.serve_on(self._bound, on_ready)

    def end(self, drain: bool) -> None:
        """Refuse new requests and let `serve` return. drain: first let open requests finish."""
        self._app.is_draining = True
        self._task = asyncio.create_task(self._end(self._drain_s if drain else 0.0))

    async def _end(self, drain_s: float) -> None:
        await finish_open(lambda: self._app.num_open, drain_s)
        end_open()
        self._http.should_exit = True
