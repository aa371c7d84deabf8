"""uvicorn, with its signal handling and its socket left to the supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
import ssl
import struct
from collections.abc import Callable, Generator
from typing import Any, Final, cast

import msgspec
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from minisgl.server.errors import error_body, refusal

# Streams are ended before the shutdown, so this only bounds clients that do not read.
GRACE_S: Final = 2

# Longer than the pause between two turns of a chat in a benchmark, shorter than a proxy's 60 s.
KEEP_ALIVE_S: Final = 30


MAX_HEAD_BYTES: Final = 64 * 2**10
"""Of a request's line and headers, which are kept whole: what is longer costs memory, and time that
grows with its square. Give or take what arrives at once."""

HEAD_S: Final = 30.0
"""For a connection's first bytes, and for the rest of a head that has begun."""

UNREAD_S: Final = 60.0
"""A client that reads less than about 50 KiB in this time, of an answer that waits for it, is gone.
Its answer holds memory, and its request pages of the KV cache."""

ABORT_CONNECTION: Final = "minisgl.abort_connection"
"""The name in an ASGI scope of a function that closes the connection, whatever is unsent."""

_REQUEST_LINE: Final = re.compile(rb"[A-Z]+ [^\r\n]* HTTP/1\.1\r\n")
_UPGRADE: Final = re.compile(rb"\r\nupgrade:[^\r\n]*(?=\r\n)", re.IGNORECASE)


class _Protocol(HttpToolsProtocol):
    """Of httptools: 20 % fewer CPU seconds a token than with h11 (docs/performance.md).

    A wish for another protocol is ignored, as servers may: for HTTP/2, which Java's HttpClient has
    by default, or for WebSockets. The parser would take what follows for that protocol, and the
    request would be without its body. Only whole lines of a head's first piece are looked at.

    Mutable: how many bytes have come since a head or a piece of a body was complete; timers that
    close a connection whose client stalls.
    """

    _num_pending = 0
    _head_timer: asyncio.TimerHandle | None = None
    _unread_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # the base class takes any transport
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head_timer, self._unread_timer):
            if timer:
                timer.cancel()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        cast(dict[str, Any], self.scope)[ABORT_CONNECTION] = self._reset
        self._await_head()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread_timer = self.loop.call_later(UNREAD_S, self._reset)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread_timer:
            self._unread_timer.cancel()

    def _reset(self) -> None:
        """Close the connection, and free what is unsent here and in the kernel."""
        if (client := self.transport.get_extra_info("socket")) and not self.transport.is_closing():
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _await_head(self) -> None:
        if not self._head_timer:
            self._head_timer = self.loop.call_later(HEAD_S, self._reset)

    def data_received(self, data: bytes) -> None:
        self._num_pending += len(data)
        if _REQUEST_LINE.match(data):
            end = data.find(b"\r\n\r\n")
            head = len(data) if end < 0 else end + 2
            if _UPGRADE.search(data, 0, head):
                data = _UPGRADE.sub(b"", data[:head]) + data[head:]
        super().data_received(data)
        if self._num_pending > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse_head()

    def on_headers_complete(self) -> None:
        self._num_pending = 0
        if self._head_timer:
            self._head_timer.cancel()
            self._head_timer = None
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_pending = 0
        super().on_body(body)

    def _refuse_head(self) -> None:
        too_large = f"the request's line and headers exceed {MAX_HEAD_BYTES} bytes"
        status, error = error_body(refusal(too_large, status=431, code="headers_too_large"))
        body = msgspec.json.encode(error)
        head = (
            f"HTTP/1.1 {status} Request Header Fields Too Large\r\n"
            "content-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


def _is_worth_saying(record: logging.LogRecord) -> bool:
    """Not that packages for WebSockets would help: nothing here speaks them, whatever is there.

    That an upgrade was asked for is a line of its own. `ws="none"` does not leave this one out.
    """
    return not record.getMessage().startswith("No supported WebSocket library")


class HttpServer(uvicorn.Server):
    """Serves `app` until `should_exit` is set. tls: over HTTPS."""

    def __init__(self, app: ASGIApp, tls: ssl.SSLContext | None = None) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            http=_Protocol,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=GRACE_S,
        )
        super().__init__(config)
        self._tls = tls
        logging.getLogger("uvicorn.error").addFilter(_is_worth_saying)  # once, however often
        self._on_started: Callable[[], None] | None = None

    async def serve_on(self, listening: socket.socket, on_started: Callable[[], None]) -> None:
        """`on_started` is called when connections are accepted."""
        self._on_started = on_started
        await self.serve([listening])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.config.ssl = self._tls  # uvicorn's own options leave out the better ciphers of TLS 1.2
        await super().startup(sockets)
        if self._on_started:
            self._on_started()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield
