"""A process before other servers: what `minisgl route` and `minisgl gateway` share.

SIGTERM lets open requests finish, for `--drain-timeout`; Ctrl-C and a second signal end them.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import socket
from collections.abc import Callable, Sequence
from typing import Protocol, get_args

from minisgl.runtime.signals import Signals
from minisgl.server.address import listen
from minisgl.server.args import SECONDS, LogFormat, LogLevel
from minisgl.server.command import finish_open
from minisgl.server.flags import Parser, flag_type, integer
from minisgl.server.web.http import HttpServer


def add_address(parser: Parser, port: int) -> None:
    """Add the flags of the address. port: the default."""
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: %(default)s)"
    )
    parser.add_argument(
        "--port", type=integer(0, 65535), default=port, metavar="PORT",
        help="port to listen on; 0 for any free one (default: %(default)s)",
    )  # fmt: skip


def add_serving(parser: Parser) -> None:
    """Add the flags of TLS, draining and logging."""
    add = parser.add_argument
    add("--ssl-certfile", metavar="FILE", help="serve HTTPS with this certificate (PEM)")
    add("--ssl-keyfile", metavar="FILE", help="the certificate's private key (PEM)")
    add(
        "--drain-timeout", type=flag_type(SECONDS), default=8.0, metavar="S",
        help="seconds for which SIGTERM lets open requests finish (default: %(default)s)",
    )  # fmt: skip
    add("--log-level", choices=get_args(LogLevel), help="what is logged (default: info)")
    add("--log-format", choices=get_args(LogFormat), help="the log's lines (default: text)")


def flags_given(parser: Parser, argv: Sequence[str]) -> argparse.Namespace:
    """Return the flags. Exits with a message if one is wrong."""
    given = argparse.Namespace(**parser.parse_all(list(argv)))
    if given.ssl_keyfile and not given.ssl_certfile:
        parser.error("--ssl-keyfile needs --ssl-certfile, the certificate of the key")
    return given


class FrontApp(Protocol):
    """What the process serves. is_draining: it refuses new requests. num_open: open requests."""

    is_draining: bool
    num_open: int


class FrontServer:
    """Serves until a signal. Mutable: it drains and ends."""

    def __init__(
        self, app: FrontApp, http: HttpServer, bound: socket.socket, drain_s: float
    ) -> None:
        self._app, self._http, self._bound, self._drain_s = app, http, bound, drain_s

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
        self._http.should_exit = True
