"""Asks a server of OpenAI's API by HTTP."""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import msgspec
from fastapi import Request, Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from minisgl.core.answer import Abilities
from minisgl.errors import EngineError, InvalidRequest, RequestError
from minisgl.server.api.chat import ChatRequest
from minisgl.server.api.left_out import Omission, OmissionLog
from minisgl.server.errors import refusal, rename
from minisgl.server.web.errors import error_body
from minisgl.server.web.respond import STREAM_HEADERS, WARNING
from minisgl_gateway.card import ModelCard
from minisgl_gateway.chat import Asked, Chat, Form, Model
from minisgl_gateway.keys.guard import key_given
from minisgl_gateway.leaving import ending, while_connected
from minisgl_gateway.router.upstream import Answer, ReplicaFailed, Stale, Upstream
from minisgl_gateway.upstream.reading import SILENT_S, events, in_time, whole
from minisgl_gateway.upstream.wire import (
    Reader,
    UpstreamFailed,
    error_of,
    fields_of,
    plain,
    tokenize_fields,
)

OWNER: Final = "minisgl"
"""`owned_by` of this project's models. Its server takes all fields."""

FRESH_S: Final = 10.0
"""How long a list of models is used."""

MAX_LISTS: Final = 64
"""The most lists that are kept. There is one for each key, because a list may depend on it."""

_PASSED: Final = (b"traceparent", b"tracestate")


class _Entry(msgspec.Struct):
    """A model of GET /v1/models. What follows `created` is this project's, or vLLM's."""

    id: str
    created: int = 0
    owned_by: str = ""
    context_length: int | None = None
    max_model_len: int | None = None
    capabilities: list[str] = msgspec.field(default_factory=lambda: ["completion", "tools"])
    has_efforts: bool = True
    has_thinking_switch: bool = True
    sampling_defaults: dict[str, int | float] = {}

    @property
    def model(self) -> Model:
        is_ours = self.owned_by == OWNER
        abilities = Abilities(
            has_reasoning="thinking" in self.capabilities,
            has_switch=self.has_thinking_switch,
            # Another server does not say it here. It refuses images itself.
            reads_images="vision" in self.capabilities or not is_ours,
        )
        return Model(
            name=self.id,
            template="",
            abilities=abilities,
            has_efforts=self.has_efforts,
            capabilities=self.capabilities,
            context_length=self.context_length or self.max_model_len,
            created=self.created,
            defaults=self.sampling_defaults,
            takes_all=is_ours,
        )


class _Entries(msgspec.Struct):
    data: list[_Entry]


class _Count(msgspec.Struct):
    count: int


class UpstreamChat(Chat):
    """Mutable: it keeps connections, lists of models, and which omissions it has logged."""

    card = ModelCard(family="", num_parameters=0, num_bytes=0, dtype="", quantization="", digest="")

    def __init__(
        self,
        url: str,
        key: str | None,
        further: Collection[str] = (),
        silent_s: float = SILENT_S,
    ) -> None:
        """url: as for OpenAI's clients; without a path, /v1 is meant. key: instead of the clients'
        own. further: fields that are not OpenAI's, and which the server takes. silent_s: how long
        it may send nothing. Raises ConfigError.
        """
        scheme, _, rest = url.rpartition("://")
        host, _, path = rest.rstrip("/").partition("/")
        root = f"/{path}".removesuffix("/v1").rstrip("/")
        self._base, self._root = (f"/{path}" if path else "/v1"), root
        self._upstream = Upstream(f"{scheme or 'http'}://{host}", flag="--upstream")
        self.name = self._upstream.name
        self._key, self._further, self._silent_s = key, further, silent_s
        self._lists: dict[str, tuple[float, list[Model]]] = {}
        self._omissions = OmissionLog()

    async def models(self, request: Request) -> Sequence[Model]:
        found = await self._listed(request)
        if not found:
            raise refusal("the upstream lists no models", status=404, code="not_found")
        return found

    async def model(self, request: Request, name: str | None) -> Model:
        found = await self._listed(request)
        named = (model for model in found if name in (model.name, None))
        if model := next(named, None):
            return model
        if name is None:
            raise InvalidRequest("the upstream lists no models: name one", param="model")
        # The upstream refuses what it does not serve, and may serve what it does not list.
        entry = _Entry(id=name, owned_by=OWNER if any(each.takes_all for each in found) else "")
        return entry.model

    async def answer(self, request: Request, asked: Asked, form: Form) -> Response:
        model = await self.model(request, asked.chat.model)
        names = {**asked.all_names, "messages": asked.names["prompt"]}
        path, fields, left_out = self._fields(asked, model)
        if asked.chat.stream:
            options = {"include_usage": True}
            if model.takes_all and form.begins_with_count:
                options["continuous_usage_stats"] = True
            fields["stream_options"] = options
        try:
            answer = await self._ask(request, self._base + path, fields)
            told = [self._omissions.warning([*asked.left_out, *left_out])]
            told.append(dict(answer.headers).get(WARNING.encode(), b"").decode("latin-1"))
            headers = {WARNING: text} if (text := "; ".join(filter(None, told))) else {}
            if asked.chat.stream and answer.is_stream:
                return _Stream(answer, form, names, headers, self._silent_s)
            reader = Reader()
            piece = reader.read(await self._body(answer, request))
            body = form.whole(piece.parts, piece.logprobs, reader.end())
        except RequestError as error:
            rename(error, names)
            raise
        return Response(msgspec.json.encode(body), 200, headers, "application/json")

    async def count_tokens(self, request: Request, chat: ChatRequest) -> int:
        model = await self.model(request, chat.model)
        try:
            fields = tokenize_fields(chat, model.name)
            answer = await self._ask(request, f"{self._root}/tokenize", fields)
            return msgspec.json.decode(await self._body(answer, request), type=_Count).count
        except (RequestError, msgspec.DecodeError) as error:
            if isinstance(error, RequestError) and error.status not in (404, 405):
                raise
            raise refusal(
                "the upstream cannot count tokens: it has no /tokenize for chats",
                status=501,
                code="not_supported",
            ) from None

    def owner(self, request: Request) -> str:
        given = key_given(request.headers)
        return hashlib.sha256(given.encode()).hexdigest() if given else ""

    def _fields(self, asked: Asked, model: Model) -> tuple[str, dict[str, Any], list[Omission]]:
        """Return the path below the base, the request's fields, and what is left out of it."""
        fields = fields_of(asked.chat, model.name)
        left_out: list[str] = []
        if not model.takes_all:
            fields, left_out = plain(fields, self._further)
        path = "/chat/completions"
        if asked.text is not None:
            path = "/completions"
            if fields.pop("logprobs", None):
                raise InvalidRequest(
                    "logprobs of a raw prompt have another form at the upstream: leave out raw",
                    param="logprobs",
                )
            fields = {name: value for name, value in fields.items() if name not in _OF_CHATS} | {
                "prompt": asked.text
            }
        shown = (asked.names.get(name, name) for name in left_out)
        return path, fields, [Omission(name, name) for name in shown]

    async def _listed(self, request: Request) -> list[Model]:
        """Return the models that the upstream lists; none if it has no list."""
        key = self._key or key_given(request.headers)
        made_at, found = self._lists.get(key, (-math.inf, []))
        if time.monotonic() - made_at < FRESH_S:
            return found
        try:
            answer = await self._ask(request, f"{self._base}/models", None)
            entries = msgspec.json.decode(await self._body(answer, request), type=_Entries)
            found = [entry.model for entry in entries.data]
        except (RequestError, msgspec.DecodeError) as error:
            if isinstance(error, RequestError) and error.status not in (404, 405):
                raise
            found = []
        if len(self._lists) >= MAX_LISTS:
            self._lists.clear()
        self._lists[key] = time.monotonic(), found
        return found

    async def _ask(self, request: Request, target: str, fields: Mapping[str, Any] | None) -> Answer:
        """Return the answer to a POST, or with fields=None to a GET, once its head has come.

        Raises UpstreamFailed, the upstream's refusal, and ClientDisconnect.
        """
        key = self._key or key_given(request.headers)
        headers = [(b"x-request-id", request.scope["request_id"].encode())]
        headers += [(n, v) for n, v in request.scope["headers"] if n in _PASSED]
        if key:
            headers.append((b"authorization", f"Bearer {key}".encode("latin-1")))
        body = b""
        if fields is not None:
            headers.append((b"content-type", b"application/json"))
            body = msgspec.json.encode(fields)
        method = "POST" if fields is not None else "GET"
        try:
            sent = in_time(self._sent(method, target, headers, body), self._silent_s)
            answer = await while_connected(sent, request.receive)
        except ReplicaFailed as error:
            raise UpstreamFailed(
                f"the upstream {self.name} failed before it answered ({error}); try again later"
            ) from None
        if answer.status == 200:
            return answer
        told = error_of(answer.status, await self._body(answer, request))
        after = dict(answer.headers).get(b"retry-after", b"")
        if after.isdigit():
            told.retry_after_s = int(after)
        raise told

    async def _body(self, answer: Answer, request: Request) -> bytes:
        return await whole(answer, request, self._silent_s)

    async def _sent(
        self, method: str, target: str, headers: list[tuple[bytes, bytes]], body: bytes
    ) -> Answer:
        """Send a request. If a kept connection ends, which may have been idle for too long, send it
        once more."""
        try:
            return await self._upstream.request(method, target, headers, body)
        except Stale:
            return await self._upstream.request(method, target, headers, body)


_OF_CHATS: Final = ("messages", "reasoning_effort", "top_logprobs", "chat_template_kwargs")


class _Stream(Response):
    """Sends an upstream's stream in a `Form`. If it fails, the error is the last event. A client
    that reads slowly slows the upstream down, and one that leaves ends the upstream's request."""

    def __init__(
        self,
        answer: Answer,
        form: Form,
        names: Mapping[str, str],
        headers: Mapping[str, str],
        silent_s: float,
    ) -> None:
        super().__init__()
        self._answer, self._form, self._names, self._silent_s = answer, form, names, silent_s
        self._more = [(name.encode(), value.encode()) for name, value in headers.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(self._send(send), receive)
        except ClientDisconnect:
            pass
        finally:
            self._answer.close()

    async def _send(self, send: Send) -> None:
        async def write(data: bytes, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        headers = [(b"content-type", self._form.media_type), *STREAM_HEADERS, *self._more]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        reader, is_begun = Reader(), False
        ready: list[bytes] = []  # of the chunks that have come together
        try:
            async for batch in events(self._answer, self._silent_s):
                for data in batch:
                    piece = reader.read(data)
                    if not is_begun:
                        ready.append(self._form.opening(reader.num_prompt_tokens))
                        is_begun = True
                    if piece.parts or piece.logprobs:
                        ready.append(self._form.text(piece.parts, piece.logprobs))
                if ready:
                    await write(b"".join(ready))
                    ready.clear()
            last = self._form.end(reader.end())
        except (RequestError, EngineError, asyncio.CancelledError) as cause:
            error = ending(cause) if isinstance(cause, asyncio.CancelledError) else cause
            if isinstance(error, RequestError):
                rename(error, self._names)
            last = b"".join(ready) + self._form.failure(error_body(error)[1])
        await write(last, more=False)
