"""Streams with which another server goes on if this one ends, for a router.

The router sends POST /replica/stream: a line with the JSON of a `Relayed`, then the client's body.
The answer is that of the endpoint. Comments in it, which only the router reads, say what the events
before them have::

    : minisgl [INDEX,[ID,...]]     these ids of the output of a prompt of the call
    : minisgl [INDEX,[],CHARS,N]   so much text of the prompt itself, and N of its tokens
    : minisgl [INDEX]              the prompt's end
    : minisgl []                   this server cannot go on; the error that follows says why

For another server the router adds what was sent. That server computes it again, and writes its
events to bring the shape of the answer to the same state, but sends only what comes after them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
from fastapi import APIRouter, FastAPI, Request, Response
from msgspec.structs import replace
from starlette.types import Message, Receive, Scope, Send

from minisgl.core import Finished, SamplingParams
from minisgl.core.sampling import Count
from minisgl.errors import InvalidRequest
from minisgl.message import TextReply, TokenText, ids_to_bytes
from minisgl.server.site import Routes, Site
from minisgl.server.strict import Json
from minisgl.server.web import body
from minisgl.server.web.errors import ErrorBody
from minisgl.server.web.respond import Output, Shape
from minisgl_gateway.router.replica_state import RELAYED

ENDS: Final = frozenset(
    ("worker_died", "worker_hung", "engine_ended_twice", "engine_error", "draining")
)
"""The codes of errors that another server may not have."""


class Relayed(Json, frozen=True, kw_only=True):
    """path: the endpoint, one of `RELAYED`. seed: of a request without one. outputs: the ids that
    an earlier server has sent, by the prompt's index in the call; None for a new request. shown:
    characters and tokens of a prompt that were sent before any id. ended: the indices of prompts
    whose ends were sent."""

    path: str
    seed: int
    outputs: dict[int, list[Count]] | None = None
    shown: dict[int, tuple[Count, Count]] = msgspec.field(default_factory=dict)
    ended: list[int] = msgspec.field(default_factory=list)


def router(site: Site) -> APIRouter:
    routes = APIRouter()

    @routes.post("/replica/stream", include_in_schema=False)
    async def stream(request: Request) -> Response:
        """A stream with which another server can go on, for a router."""
        state = request.app.state
        data = await body.read_bytes(request, state.bodies, body.owner_of(request.scope))
        line, _, rest = data.partition(b"\n")
        relayed = body.parse(line, Relayed)
        if relayed.path not in RELAYED:
            raise InvalidRequest(f"path must be one of {', '.join(RELAYED)}", param="path")
        return _Passed(request.app, relayed, rest)

    return routes


class _Passed(Response):
    """The answer of the endpoint."""

    def __init__(self, app: FastAPI, relayed: Relayed, data: bytes) -> None:
        super().__init__()
        self._app, self._relayed = app, relayed
        self._messages: list[Message] = [{"type": "http.request", "body": data}]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def next_message() -> Message:
            return self._messages.pop() if self._messages else await receive()

        path = self._relayed.path
        scope.update(path=path, raw_path=path.encode(), relay=_Router(self._relayed))
        await self._app.router(scope, next_message, send)


class _Router:
    """A `Relay`."""

    def __init__(self, relayed: Relayed) -> None:
        self._relayed = relayed
        self.outputs: Mapping[int, bytes] | None = None
        if relayed.outputs is not None:
            # The last token of a prompt that has ended is sampled again, and ends it again.
            self.outputs = {
                index: ids_to_bytes(ids[:-1] if index in relayed.ended else ids)
                for index, ids in relayed.outputs.items()
            }

    def seeded(self, sampling: SamplingParams) -> SamplingParams:
        return sampling if sampling.seed is not None else replace(sampling, seed=self._relayed.seed)

    def shape(self, shape: Shape) -> Shape:
        return _Noted(shape, self._relayed)


class _Noted(Shape):
    """Writes what a shape does, with comments. Mutable: it counts what was sent before.

    The shape writes that, too, because it numbers calls and tokens.
    """

    def __init__(self, shape: Shape, relayed: Relayed) -> None:
        self.media_type, self.returns_ids = shape.media_type, shape.returns_ids
        self._shape, self._ended = shape, relayed.ended
        self._goes_on = relayed.outputs is not None
        self._left = {index: len(ids) for index, ids in (relayed.outputs or {}).items()}
        self._shown = dict(relayed.shown)

    def whole(self, outputs: list[Output]) -> msgspec.Struct:
        return self._shape.whole(outputs)

    def opening(self, num_prompt_tokens: int) -> bytes:
        self._shape.prompt_ids = self.prompt_ids
        data = self._shape.opening(num_prompt_tokens)
        return b"" if self._goes_on else data

    def text(self, index: int, reply: TextReply) -> bytes:
        if (left := self._left.get(index, 0)) <= 0 and index not in self._ended:
            return self._new_text(index, reply)
        self._left[index] = left - len(reply.token_ids)
        if not reply.logprobs:  # they are not computed again
            none = TokenText(data=b"", offset=0)
            num = len(reply.token_ids)
            reply = replace(reply, logprobs=[0.0] * num, tokens=[none] * num)
        self._shape.text(index, reply)
        return b""

    def _new_text(self, index: int, reply: TextReply) -> bytes:
        ids, num_chars, num_tokens = reply.token_ids, *self._shown.get(index, (0, 0))
        text, prompt = reply.text[:num_chars], reply.prompt[:num_tokens]
        if text or prompt:  # an earlier server has sent that of the prompt itself
            self._shown[index] = (num_chars - len(text), num_tokens - len(prompt))
            sent = TextReply(uid=reply.uid, text=text, token_ids=[], prompt=prompt)
            self._shape.text(index, sent)
            reply = replace(reply, text=reply.text[num_chars:], prompt=reply.prompt[num_tokens:])
            if not (ids or reply.text or reply.prompt):
                return b""
        lengths = () if ids else (len(reply.text), len(reply.prompt))
        return self._shape.text(index, reply) + _note(index, ids, *lengths)

    def end(self, index: int, end: Finished) -> bytes:
        data = self._shape.end(index, self._counted(end))
        return b"" if index in self._ended else data + _note(index)

    def closing(self, ends: list[Finished]) -> bytes:
        return self._shape.closing([self._counted(end) for end in ends])

    def failure(self, error: ErrorBody) -> bytes:
        data = self._shape.failure(error)
        return _note() + data if error.error.code in ENDS else data

    def _counted(self, end: Finished) -> Finished:
        return replace(end, num_resumed=end.num_resumed + self._goes_on)


def _note(*values: int | Sequence[int]) -> bytes:
    return b": minisgl " + msgspec.json.encode(values) + b"\n\n"


ROUTES: Final = Routes(router)
