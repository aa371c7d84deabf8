"""HTTP connections: uvicorn, whose signals and socket the supervisor handles."""

from __future__ import annotations

import asyncio
import contextlib
import http
import logging
import re
import socket
import ssl
import struct
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, Final, cast

import msgspec
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from minisgl.errors import InvalidRequest
from minisgl.server.errors import refusal
from minisgl.server.web.connections import Connections, accept, client_address, most_connections
from minisgl.server.web.errors import error_body, error_response

GRACE_S: Final = 2
"""The longest wait for clients at a shutdown. Streams have ended by then, so the server waits only
for a client that does not read."""

KEEP_ALIVE_S: Final = 30
"""How long a connection may be idle: longer than a benchmark's pause between two turns of a chat,
shorter than a proxy's 60 s."""

MAX_HEAD_BYTES: Final = 64 * 2**10
"""The most bytes of a request's line and headers. Parsing takes memory, and time that grows with
the square of the length."""

MAX_AHEAD: Final = 16
"""The most requests that a client may send behind one that has no answer yet. Thousands fit in one
read of the socket, and nobody else is served while they are parsed."""

HEAD_S: Final = 30.0
"""The longest wait for a complete head (a request's line and headers) on a connection without an
open request, and for TLS's handshake."""

PROBES: Final = frozenset((b"/health", b"/ready"))
"""Paths that answer when all connections are taken by requests."""

UNREAD_S: Final = 60.0
"""The longest wait for a client that reads less than about 50 KiB of its answer. The answer takes
memory, and its request takes pages of the KV cache."""

ABORT_CONNECTION: Final = "minisgl.abort_connection"
"""The name, in an ASGI scope, of a function that closes the connection and drops unsent bytes."""

_REQUEST_LINE: Final = re.compile(rb"[A-Z]+ [^\r\n]* HTTP/1\.1\r\n")
_UPGRADE: Final = re.compile(rb"\r\nupgrade:[^\r\n]*(?=\r\n)", re.IGNORECASE)


class _Protocol(HttpToolsProtocol):
    """One connection, parsed by httptools, which takes less CPU time than h11.

    An Upgrade header (to HTTP/2, which Java's HttpClient sends by default, or to WebSocket) is
    removed, because the parser would take the body for the other protocol; a server may ignore it.
    It is found only among the complete lines that arrive first.

    Mutable: it counts the bytes since a head or a piece of a body was complete, and its timers
    close the connection of a client that stalls. starting: the task that makes its transport.
    _answering: the request whose answer is under way, with others behind it (pipelining).
    """

    starting: asyncio.Task[None]
    _num_pending = 0
    _is_reading = False
    _answering: Any = None
    _head_timer: asyncio.TimerHandle | None = None
    _unread_timer: asyncio.TimerHandle | None = None

    def __init__(
        self,
        config: uvicorn.Config,
        state: uvicorn.server.ServerState,
        connections: Connections,
        client: str,
    ) -> None:
        super().__init__(config, state, {})
        self._served = self.app
        self._connections, self.address = connections, client_address(client)
        connections.add(self)

    def displace(self) -> None:
        """Close the connection, which waits for its client, for a new one."""
        if self.starting.done():
            self.transport.abort()
        else:
            self.starting.cancel()

    def release(self) -> socket.socket | None:
        transport = self.transport
        is_busy = self._is_reading or self._answering or not self.starting.done()
        if is_busy or transport.is_closing() or transport.get_write_buffer_size():
            return None
        released: socket.socket = transport.get_extra_info("socket").dup()
        transport.abort()  # it closes this process's copy only
        return released

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # the base class takes any transport
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head_timer, self._unread_timer):
            if timer:
                timer.cancel()
        self._connections.remove(self)
        super().connection_lost(exc)
        if self._answering:  # uvicorn tells only the last request that came
            self._answering.disconnected = True
            self._answering.message_event.set()

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= MAX_AHEAD:
            self._reset()
            raise ConnectionError("too many requests without an answer")  # this ends the parsing
        super().on_message_begin()
        self._is_reading = True
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
        """Close the connection, and free unsent bytes here and in the kernel."""
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
        if self.transport.is_closing():
            return
        if self._num_pending > MAX_HEAD_BYTES:
            self._refuse(_too_large())
        elif not self._answering:
            # This is no head (but a blank line, or the rest of a body that was refused), and yet
            # it has ended uvicorn's wait for the next request.
            self._await_head()

    def on_headers_complete(self) -> None:
        self._num_pending = 0
        if self._head_timer:
            self._head_timer.cancel()
            self._head_timer = None
        self.app = self._served
        if len(self.url) + sum(len(n) + len(v) + 4 for n, v in self.headers) > MAX_HEAD_BYTES:
            # It came in one read. The parser of URLs takes none as long as that.
            self.app, self.url = partial(_refuse, _too_large()), self.url[:1024]
        elif self._connections.is_over and self.url.partition(b"?")[0] not in PROBES:
            self.app = partial(_refuse, _too_many())
        if self.parser.get_http_version() != "1.1":
            self.expect_100_continue = False  # RFC 9110, 10.1.1
            self.app = partial(_unframed, self.app)
        elif self.expect_100_continue:
            self.app = partial(_closed_unless_read, self.app)
        super().on_headers_complete()
        self._answering = self._answering or self.cycle
        if len(self.pipeline) == 1:  # else nobody sees that the client leaves
            self.flow.resume_reading()
        if self._connections.closes:
            self.cycle.keep_alive = False

    def on_message_complete(self) -> None:
        self._is_reading = False
        super().on_message_complete()
        if not self.cycle.response_complete:
            self._connections.serve(self)

    def on_response_complete(self) -> None:
        self._answering = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()
        if not self._answering:
            self._connections.wait(self)

    def on_body(self, body: bytes) -> None:
        self._num_pending = 0
        super().on_body(body)

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that the parser refuses. msg: uvicorn's text, which is not used."""
        wrong = "the request is not valid HTTP/1.1; if the client speaks HTTPS, use an http:// URL"
        self._refuse(refusal(wrong, status=400, code="invalid_http"))

    def _refuse(self, error: InvalidRequest) -> None:
        """Answer instead of the application, and close the connection."""
        status, answer = error_body(error)
        body = msgspec.json.encode(answer)
        head = (
            f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}\r\n"
            "content-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


def _too_large() -> InvalidRequest:
    what = f"the request's line and headers exceed {MAX_HEAD_BYTES} bytes"
    return refusal(what, status=431, code="headers_too_large")


def _too_many() -> InvalidRequest:
    what = "all connections of this server have requests; try again later"
    return refusal(what, status=503, code="too_many_connections")


async def _refuse(error: InvalidRequest, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request instead of the application, and close the connection."""
    response = error_response(error, scope["path"])
    response.headers["Connection"] = "close"
    await response(scope, receive, send)


async def _unframed(app: Any, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a client that does not know the chunked encoding (HTTP/1.0). Its answer ends with the
    connection, which uvicorn closes."""
    cycle = cast(Any, send).__self__

    async def send_unframed(message: Message) -> None:
        cycle.chunked_encoding = False
        cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    await app(scope, receive, send_unframed)


async def _closed_unless_read(app: Any, scope: Scope, receive: Receive, send: Send) -> None:
    """Close the connection if the answer comes before the client was told to send the body
    (Expect: 100-continue). The client may then send it or not, so the next request has no start."""
    cycle = cast(Any, send).__self__

    async def send_and_close(message: Message) -> None:
        if cycle.waiting_for_100_continue:
            cycle.keep_alive = False
        await send(message)

    await app(scope, receive, send_and_close)


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client disconnects. ASGI's `receive` also reports a disconnect after a
    complete response, so this always ends."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _is_useful(record: logging.LogRecord) -> bool:
    """Return False for uvicorn's advice to install a package for WebSockets. This server does not
    use them, and `ws="none"` does not prevent the advice."""
    return not record.getMessage().startswith("No supported WebSocket library")


class HttpServer(uvicorn.Server):
    """Serves `app` until `should_exit` is set.

    tls: the settings of HTTPS; None is HTTP. per_connection: the descriptors that a connection
    needs.
    """

    def __init__(
        self, app: ASGIApp, tls: ssl.SSLContext | None = None, *, per_connection: int = 1
    ) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            http="httptools",
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=GRACE_S,
        )
        super().__init__(config)
        self._tls, self._per_connection = tls, per_connection
        self._accepting: asyncio.Task[None] | None = None
        logging.getLogger("uvicorn.error").addFilter(_is_useful)  # adding it again changes nothing
        self._on_started: Callable[[], None] | None = None

    async def serve_on(self, listening: socket.socket, on_started: Callable[[], None]) -> None:
        """Serve on a listening socket. on_started: called when connections are accepted."""
        self._on_started = on_started
        await self.serve([listening])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        assert sockets, "serve_on gives the socket"
        (listening,) = sockets
        listening.setblocking(False)
        self.servers = []
        self.connections = Connections(most_connections(self._per_connection))
        self._accepting = asyncio.create_task(self.accept(listening))
        self.started = True
        if self._on_started:
            self._on_started()

    async def accept(self, listening: socket.socket) -> None:
        """Accept connections of a socket that does not block."""
        connect = partial(_Protocol, self.config, self.server_state, self.connections)
        await accept(listening, self.connections, connect, self._tls, HEAD_S)

    def leave(self, listening: socket.socket, *, closes: bool) -> None:
        """Accept no more connections, and lose none that is being accepted: another process accepts
        those that wait at the socket. closes: each connection closes after its next answer."""
        self.connections.is_leaving, self.connections.closes = True, closes
        asyncio.get_running_loop().remove_reader(listening)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._accepting:
            self._accepting.cancel()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield
