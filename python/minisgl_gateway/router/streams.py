"""A request that the router passes on, and how its stream outlives a replica.

The router keeps the ids of a stream. `minisgl_gateway.watch.relayed` says how a replica tells them,
in comments that the client does not get. Another replica goes on if it has the same weights,
version and settings (`ReplicaState.digest`). Once for each stream: what ends two replicas may be
the request.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import AsyncGenerator
from typing import Any, Final

import msgspec
from starlette.datastructures import Headers
from starlette.types import Scope

from minisgl.server.web.errors import error_body, in_form_of
from minisgl.server.web.http import ABORT_CONNECTION
from minisgl.utils.logger import get_logger
from minisgl_gateway.keys.guard import key_given
from minisgl_gateway.router.fleet import Fleet, NoReplica, Replica
from minisgl_gateway.router.replica_state import RELAYED
from minisgl_gateway.router.upstream import EVENTS, JSON_LINES, Answer, ReplicaFailed, end_to_end
from minisgl_gateway.router.waits import Wait
from minisgl_gateway.watch.replica import PREFIX_HEADER

logger = get_logger(__name__)

MAX_BODY: Final = 2**20
"""The most bytes of a request whose stream can go on: its body is kept until its end."""

_NOTE: Final = re.compile(rb"^: minisgl (\[[\d,\[\]]*\])\n\n", re.MULTILINE)
_HEAD: Final = re.compile(rb'^data: (\{"id":"[^"]*","created":\d+)', re.MULTILINE)
"""What the chunks of OpenAI's streams have in common. A second replica's is another."""


_OF_THE_DOOR: Final = (b"origin", b"sec-fetch-site")
"""The router has checked these headers itself. A replica would refuse pages that the router
allows."""


class _Asked(msgspec.Struct):
    stream: bool | None = None


class Stream:
    """What the router knows of a stream. Mutable.

    digest: of the replica that has begun it; "" if that cannot say what it has sent. failure: the
    replica's last event, if it cannot go on.
    """

    def __init__(self, path: str) -> None:
        self.digest, self.failure = "", b""
        self._path, self._seed = path, secrets.randbits(63)
        self._outputs: dict[int, list[int]] = {}
        self._shown: dict[int, list[int]] = {}
        self._ended: list[int] = []
        self._goes_on = False
        self._num_asked, self._has_begun = 0, False
        self._heads: list[bytes] = []

    @classmethod
    def of(cls, method: str, path: str, body: bytes) -> Stream | None:
        """Return what is known of a new request; None if its answer cannot go on."""
        if method != "POST" or path not in RELAYED or len(body) > MAX_BODY:
            return None
        try:
            asked = msgspec.json.decode(body, type=_Asked)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None  # the replica refuses it
        return cls(path) if asked.stream else None

    def request(self, body: bytes) -> bytes:
        """Return the body of the request to a replica. body: the client's."""
        self._num_asked += 1
        line: dict[str, Any] = {"path": self._path, "seed": self._seed}
        if self._goes_on:
            shown = {index: n for index, n in self._shown.items() if index not in self._outputs}
            line |= {"outputs": self._outputs, "shown": shown, "ended": self._ended}
        return msgspec.json.encode(line) + b"\n" + body

    def goes_on(self) -> bool:
        """Let the next request continue the answer. Returns False if it cannot."""
        self._goes_on = bool(self._outputs or self._shown)  # else nothing was sent
        return self._num_asked <= 1 and (self._goes_on or not self._has_begun)

    def read(self, data: bytes) -> bytes:
        """Return the piece of the answer without what is for the router."""
        num_replicas = 1 + self._goes_on  # each has a head of its own
        if len(self._heads) < num_replicas and (head := _HEAD.search(data)):
            self._heads.append(head[1])
        if len(self._heads) > 1:
            data = data.replace(self._heads[1], self._heads[0])
        shown, _, failure = data.partition(b": minisgl []\n\n")
        self.failure += failure
        self._has_begun |= b"data:" in shown
        return _NOTE.sub(self._note, shown)

    def _note(self, found: re.Match[bytes]) -> bytes:
        match msgspec.json.decode(found[1]):
            case [index] if index not in self._ended:
                self._ended.append(index)
            case [index, [], num_chars, num_tokens]:
                shown = self._shown.setdefault(index, [0, 0])
                self._shown[index] = [shown[0] + num_chars, shown[1] + num_tokens]
            case [index, ids]:
                self._outputs.setdefault(index, []).extend(ids)
        return b""


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


async def pieces(
    answer: Answer, request: PassedRequest, fleet: Fleet, replica: Replica | None
) -> AsyncGenerator[tuple[bytes, bool], None]:
    """Yield the pieces of an answer, each with whether more follow.

    replica: of the answer. Raises ReplicaFailed.
    """
    stream = request.stream
    if stream is None or replica is None or not stream.digest:
        async for data in answer:
            yield data, not answer.is_complete
        return
    try:
        async for data in answer:
            if (shown := stream.read(data)) or answer.is_complete:
                yield shown, bool(stream.failure) or not answer.is_complete
        if not stream.failure:
            return
        error = ReplicaFailed("it says so")
    except ReplicaFailed as failed:
        error = failed
    if (second := _second(stream, fleet, replica)) is not None:
        fleet.failed(replica, error)
        second.num_open += 1
        rest, outcome = None, "left"
        try:
            rest = await request.ask(second)
            if goes_on := rest.status == 200:
                logger.info("replica %s goes on for %s (%s)", second.name, replica.name, error)
                async for data in rest:
                    stream.failure = b""
                    yield stream.read(data) + stream.failure, not rest.is_complete
            outcome = "answered"
            if goes_on:
                return
        except ReplicaFailed as failed:
            outcome = "failed"
            fleet.failed(second, failed)
            error = ReplicaFailed(f"{error}; {second.name} was to go on, and failed, too: {failed}")
        finally:
            if rest:
                rest.close()
            second.num_open -= 1
            second.ends[outcome] += 1
    if not stream.failure:
        raise error
    yield stream.failure, False


def _second(stream: Stream, fleet: Fleet, replica: Replica) -> Replica | None:
    """Return another replica of the same model; None if there is none, or the stream cannot go
    on."""
    others = [(each, each.view.state) for each in fleet.replicas if each is not replica]
    same = [each for each, state in others if state and state.digest == stream.digest]
    try:
        without = [each for each in fleet.replicas if each not in same]
        return fleet.choose(without=without)[0] if stream.goes_on() else None
    except NoReplica:
        return None


def last_event(path: str, media_type: bytes, error: Exception) -> bytes | None:
    """Return the event, or None if the answer is not a stream of events. media_type: of the
    answer."""
    body = error_body(error)[1]
    if media_type == JSON_LINES:
        return msgspec.json.encode(in_form_of(path, body)) + b"\n"
    if media_type != EVENTS:
        return None
    name = b""
    form: object = in_form_of(path, body)
    if path.startswith("/v1/messages"):
        name = b"event: error\n"
    elif path.startswith("/v1/responses"):
        name = b"event: error\n"
        shown = body.error
        form = {"type": "error", "code": shown.code, "message": shown.message, "param": shown.param}
    return name + b"data: " + msgspec.json.encode(form) + b"\n\n"
