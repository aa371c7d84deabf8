"""An HTTP/1.1 client of one server: it keeps connections, and streams answers.

Bodies are not parsed, but a piece of an answer is made of whole chunks of the chunked encoding. The
server writes whole events as chunks, so a stream that is cut ends after a whole event.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Final, cast
from urllib.parse import urlsplit

import httptools

from minisgl.errors import ConfigError
from minisgl.server.web.guards import VIA
from minisgl_gateway.keepalive import keep_alive

Headers = Sequence[tuple[bytes, bytes]]

CONNECT_S: Final = 5.0
"""A connection that is not made in this time fails, and another replica is tried."""
KEEPALIVE: Final = (10, 5, 4)
"""See `keep_alive`: requests at a replica whose machine is gone fail after 30 s."""

IDLE_S: Final = 20.0
"""An unused connection is closed after this time, before the server closes it (after 30 s)."""

EVENTS: Final = b"text/event-stream"
JSON_LINES: Final = b"application/x-ndjson"
"""Answers of these media types are streams, whose end is an event or a line of its own."""

MAX_UNREAD: Final = 256 * 2**10
"""So many bytes are kept for a slow client. Above it the replica has to wait."""

MAX_HEAD: Final = 256 * 2**10
MAX_CHUNK: Final = 64 * 2**20
"""The most bytes of an answer's head and of one chunk, which are kept until they are whole."""

_OF_ONE_HOP: Final = frozenset(
    (b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization",
     b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"expect")
)  # fmt: skip
"""A proxy does not pass these on (RFC 9110, section 7.6.1)."""


def end_to_end(headers: Headers, *others: bytes) -> list[tuple[bytes, bytes]]:
    """Return the headers that a proxy passes on. others: further names to leave out."""
    return [(n, v) for n, v in headers if n.lower() not in _OF_ONE_HOP and n.lower() not in others]


def bearer(key: str | None) -> Headers:
    """Return the headers of a request with an API key; none if `key` is None."""
    return [(b"authorization", f"Bearer {key}".encode())] if key else []


def with_key(headers: Headers) -> Headers:
    """Return those of a client's headers that may hold its API key."""
    return [(n, v) for n, v in headers if n in (b"authorization", b"x-api-key")]


class ReplicaFailed(Exception):
    """The replica cannot be reached, or ended before its answer did."""


class Unreachable(ReplicaFailed):
    """Nothing accepts connections at the replica's address."""


class Stale(ReplicaFailed):
    """A kept connection ended before its answer began: it may have been idle for too long."""


class Answer:
    """Status, headers, and the body as it comes. Mutable. `close` must be called. media_type: of
    the body, without parameters."""

    def __init__(self, connection: _Connection, pool: Upstream) -> None:
        self.status, self.headers = connection.status, connection.headers
        self._connection, self._pool = connection, pool
        self._first = b""
        self.media_type = dict(self.headers).get(b"content-type", b"").partition(b";")[0].strip()
        self.is_stream = self.media_type in (EVENTS, JSON_LINES)

    async def begin(self) -> None:
        """Wait for the first piece of a stream, or for the whole of another body.

        Raises ReplicaFailed.
        """
        self._first = await (self._connection.read() if self.is_stream else self.whole())

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield what has arrived since the last piece. Raises ReplicaFailed."""
        if self._first:
            yield self._first
        while data := await self._connection.read():
            yield data

    @property
    def is_complete(self) -> bool:
        """Whether the whole answer was read."""
        return self._connection.is_complete and not self._connection.has_unread

    async def whole(self) -> bytes:
        """Return the rest of the body. Raises ReplicaFailed."""
        return b"".join([data async for data in self])

    def close(self) -> None:
        """Keep the connection if the answer is complete. Else close it, which aborts the
        request."""
        self._pool.release(self._connection)


class Upstream:
    """The connections to one replica. Mutable."""

    def __init__(self, url: str, flag: str = "--replica") -> None:
        """flag: which gave `url`. Raises ConfigError if that is not the URL of a server."""
        try:
            parts = urlsplit(url)
            port = parts.port
            (parts.hostname or "").encode("idna")  # as a connection does
        except ValueError:
            parts, port = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
            raise ConfigError(
                f"{flag} {url}: must be the address of a server, such as http://10.0.0.5:1919"
            )
        self.name = parts.netloc.rpartition("@")[2]
        self._host = parts.hostname
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = port or (443 if self._tls else 80)
        self._idle: deque[tuple[float, _Connection]] = deque()
        self._open: set[_Connection] = set()

    async def request(
        self, method: str, target: str, headers: Headers = (), body: bytes = b""
    ) -> Answer:
        """Return the answer once its headers have come. Raises ReplicaFailed."""
        line = f"{method} {target} HTTP/1.1\r\nhost: {self.name}\r\nvia: {VIA}\r\n"
        head = [line.encode("latin-1")]
        head += [name + b": " + value + b"\r\n" for name, value in headers]
        if body or method not in ("GET", "DELETE"):
            head.append(b"content-length: %d\r\n" % len(body))
        data = b"".join((*head, b"\r\n", body))
        kept = self._take_idle()
        connection = kept or await self._connect()
        self._open.add(connection)
        try:
            await connection.ask(data)
        except BaseException as error:
            self.release(connection)
            if kept and isinstance(error, ReplicaFailed):
                raise Stale(str(error)) from error
            raise
        return Answer(connection, self)

    async def get(self, target: str, headers: Headers = ()) -> tuple[int, bytes]:
        """Return the status and the body of a GET. Raises ReplicaFailed."""
        answer = await self.request("GET", target, headers)
        try:
            return answer.status, await answer.whole()
        finally:
            answer.close()

    def give_up(self, silent_s: float) -> None:
        """Let requests fail of which nothing has come for `silent_s` seconds."""
        for connection in list(self._open):
            if time.monotonic() - connection.heard_at >= silent_s:
                connection.fail(f"nothing came for {silent_s:g} s")

    def release(self, connection: _Connection) -> None:
        self._open.discard(connection)
        if connection.is_complete and not connection.is_closed:
            self._idle.append((time.monotonic(), connection))
        else:
            connection.abort()

    def close(self) -> None:
        while self._idle:
            self._idle.pop()[1].abort()

    def _take_idle(self) -> _Connection | None:
        while self._idle:
            since, connection = self._idle.pop()
            if not connection.is_closed and time.monotonic() - since < IDLE_S:
                return connection
            connection.abort()
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                transport, connection = await loop.create_connection(
                    _Connection, self._host, self._port, ssl=self._tls
                )
            keep_alive(transport.get_extra_info("socket"), *KEEPALIVE)
        except OSError as error:  # also a TimeoutError or an SSLError
            reason = error.strerror or str(error) or f"no connection within {CONNECT_S:g} s"
            raise Unreachable(reason) from error
        return connection


class _Connection(asyncio.Protocol):
    """One connection, with one request at a time. Mutable. heard_at: when something came last, or
    the request was sent."""

    def __init__(self) -> None:
        self._ended: str | None = None
        self._wake: asyncio.Future[None] | None = None
        self._reset()

    def _reset(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self.status, self.headers = 0, list[tuple[bytes, bytes]]()
        self._has_head = self.is_complete = self._is_chunked = self._has_length = False
        self._ready: list[bytes] = []
        self._chunk: list[bytes] = []
        self._num_ready = self._num_held = 0
        self._is_paused = False

    @property
    def has_unread(self) -> bool:
        return bool(self._ready)

    @property
    def is_closed(self) -> bool:
        return self._ended is not None or self._transport.is_closing()

    def abort(self) -> None:
        self._transport.abort()

    def fail(self, reason: str) -> None:
        self._ended = reason
        self.abort()
        self._wake_reader()

    async def ask(self, data: bytes) -> None:
        """Send a request and wait for the head of its answer. Raises ReplicaFailed."""
        self._reset()
        self.heard_at = time.monotonic()
        self._transport.write(data)
        while not self._has_head:
            await self._wait()

    async def read(self) -> bytes:
        """Return what has arrived since the last call; b"" at the end. Raises ReplicaFailed."""
        while not self._ready:
            if self.is_complete:
                return b""
            await self._wait()
        data, self._ready, self._num_ready = b"".join(self._ready), [], 0
        if self._is_paused and not self.is_closed:
            self._is_paused = False
            self._transport.resume_reading()
        return data

    async def _wait(self) -> None:
        if self._ended is not None:
            raise ReplicaFailed(self._ended)
        self._wake = asyncio.get_running_loop().create_future()
        await self._wake

    def _wake_reader(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    # --- called by asyncio -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def connection_lost(self, exc: Exception | None) -> None:
        if self._has_head and not (exc or self._is_chunked or self._has_length):
            self.is_complete = True  # such a body ends with its connection (RFC 9112, section 6.3)
        why = f" ({exc})" if exc else ""
        self._ended = self._ended or f"the connection ended{why}"
        self._wake_reader()

    def data_received(self, data: bytes) -> None:
        self.heard_at = time.monotonic()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._ended = self._ended or f"the answer is not HTTP ({error})"
            self._transport.abort()
        if self._num_ready > MAX_UNREAD and not self._is_paused and not self.is_complete:
            self._is_paused = True
            self._transport.pause_reading()
        self._wake_reader()

    # --- called by the parser --------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        self._hold(len(name) + len(value), MAX_HEAD, "head")
        self.headers.append((name.lower(), value))
        if name.lower() == b"transfer-encoding":
            self._is_chunked = True
        self._has_length |= name.lower() == b"content-length"

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self._has_head = self.status >= 200  # before it there may be 1xx (RFC 9110, section 15.2)
        self._num_held = 0

    def on_body(self, body: bytes) -> None:
        if self._is_chunked:
            self._hold(len(body), MAX_CHUNK, "chunk")
            self._chunk.append(body)
        else:
            self._add([body])

    def on_chunk_complete(self) -> None:
        self._add(self._chunk)
        self._chunk, self._num_held = [], 0

    def _hold(self, num_bytes: int, most: int, what: str) -> None:
        """Count bytes of a head or a chunk. If it is too long, the connection ends."""
        self._num_held += num_bytes
        if self._num_held > most:
            self._ended = f"a {what} of the answer exceeds {most} bytes"
            raise ReplicaFailed(self._ended)  # so the parser stops

    def _add(self, pieces: list[bytes]) -> None:
        self._ready += pieces
        self._num_ready += sum(map(len, pieces))

    def on_message_complete(self) -> None:
        self.is_complete = self._has_head
        if not self._has_head:
            self.headers = []
            return
        if not self._parser.should_keep_alive():
            self._transport.close()
