"""A client's request in the form that a router passes on to a replica."""

from __future__ import annotations

from typing import Any, Final

from starlette.datastructures import Headers
from starlette.types import Scope

from minisgl.server.web.http import ABORT_CONNECTION
from minisgl_gateway.keys.guard import key_given
from minisgl_gateway.router.fleet import Replica
from minisgl_gateway.router.streams import Stream
from minisgl_gateway.router.upstream import Answer, ReplicaFailed, end_to_end
from minisgl_gateway.router.waits import Wait
from minisgl_gateway.watch.replica import PREFIX_HEADER

_OF_THE_DOOR: Final = (b"origin", b"sec-fetch-site")
"""The router has checked these headers itself. A replica would refuse pages that the router
allows."""


class PassedRequest:
    """target: the path and the query as the client sent them. headers: without those that concern
    one connection, and those that the router's door has checked. key: the text of the client's API
    key, or "". stream: what is known of an answer that can go on at another replica.
    abort_connection: cuts the client's connection."""

    def __init__(self, scope: Scope, body: bytes) -> None:
        self.path, self.method, self.body = scope["path"], scope["method"], body
        self.id = scope["request_id"]
        self.key = key_given(Headers(scope=scope))
        query = scope["query_string"].decode("latin-1")
        raw = scope.get("raw_path") or scope["path"].encode()
        self.target = raw.partition(b"?")[0].decode("latin-1") + (query and f"?{query}")
        dropped = (b"host", b"content-length", b"x-request-id", PREFIX_HEADER.encode())
        self.headers = end_to_end(scope["headers"], *dropped, *_OF_THE_DOOR)
        self.headers.append((b"x-request-id", self.id.encode()))
        self.stream = Stream.of(self.method, self.path, body)
        self.abort_connection: Any = scope.get(ABORT_CONNECTION, _break_off)

    def began(self) -> None:
        """Forget the body when the answer has begun, unless another replica may go on with it."""
        if not (self.stream and self.stream.digest):
            self.body = b""

    async def ask(self, replica: Replica) -> Answer:
        """Send the request to a replica and return the answer. Raises ReplicaFailed, also if the
        replica does not have the request (`Wait`)."""
        wait = Wait(self.id)
        target, body, state = self.target, self.body, replica.view.state
        if self.stream and state:
            self.stream.digest = state.digest
            if state.digest:
                target, body = "/replica/stream", self.stream.request(self.body)
        replica.waits.add(wait)
        try:
            async with wait.limit:
                return await replica.upstream.request(self.method, target, self.headers, body)
        except TimeoutError:
            raise ReplicaFailed("it says that it does not have the request") from None
        finally:
            replica.waits.discard(wait)


def _break_off() -> None:
    """Cut an answer by an exception, if the HTTP server has no `ABORT_CONNECTION`."""
    raise ConnectionAbortedError("a replica failed within its answer")
