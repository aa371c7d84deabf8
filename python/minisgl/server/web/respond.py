"""Answers a request with the replies to its prompts, whole or as a stream of events.

All API families use it. The headers are sent when the request is accepted, so a refusal by the
scheduler is a 4xx for streams too. A call is aborted when its client leaves: a task waits for the
disconnect, and a `finally` covers all other ways.

Why not Starlette's StreamingResponse: it starts a task group per response and sends one chunk at a
time; here one write has all events of a wake-up.
"""

from __future__ import annotations

import asyncio
import secrets
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Protocol, Self

import msgspec
from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from minisgl.core import Finished, SamplingParams
from minisgl.core.adapters import Adapters
from minisgl.core.answer import Kind, SplitAnswer, collect
from minisgl.errors import EngineError, RequestError
from minisgl.message import Prompt, PromptToken, TextReply, TokenText
from minisgl.server.call import Call, ClientGone, Replies
from minisgl.server.clients import Key, Origin, Relay
from minisgl.server.errors import DeadlineExceeded, rename
from minisgl.server.frontend import Frontend
from minisgl.server.observe import Observer
from minisgl.server.web.errors import ErrorBody, client_left, error_body
from minisgl.server.web.http import ABORT_CONNECTION, wait_for_disconnect

_encode: Final = msgspec.json.Encoder().encode

ERROR_READ_S: Final = 2.0
"""How long a client may leave the error of its deadline unread. Then its connection is closed."""

HeaderAnswer = Callable[[Request, Frontend, Sequence[Prompt], str], Awaitable[Response]]
"""Answers requests with a header, a row of the table `request_headers`, instead of the model. The
last argument is the namespace of the prefix cache."""

DONE: Final = b"data: [DONE]\n\n"

HOLD_ON: Final = b": the engine starts again; this answer goes on\n\n"
"""A comment in a stream of server-sent events: clients and proxies see that it is alive."""

WARNING: Final = "x-minisgl-warning"
"""The response header that names the omitted parts of a request, and says what `max_tokens` was
lowered to."""

STREAM_HEADERS: Final = (
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """The whole answer to one prompt.

    logprobs, tokens, prompt: as in `TextReply`; empty unless the request asks for them. parts:
    empty unless the prompt asks for a split answer.
    """

    text: str
    token_ids: list[int]
    logprobs: list[float]
    tokens: list[TokenText]
    prompt: list[PromptToken]
    end: Finished
    parts: list[tuple[Kind, str]]

    @classmethod
    def of(cls, replies: Sequence[TextReply], end: Finished) -> Self:
        return cls(
            text="".join(reply.text for reply in replies),
            token_ids=[token for reply in replies for token in reply.token_ids],
            logprobs=[logprob for reply in replies for logprob in reply.logprobs or ()],
            tokens=[token for reply in replies for token in reply.tokens],
            prompt=[token for reply in replies for token in reply.prompt],
            end=end,
            parts=[part for reply in replies for part in reply.parts],
        )

    @property
    def answer(self) -> SplitAnswer:
        """The answer as reasoning, content and calls. Without `parts` all of it is content."""
        return collect(self.parts) if self.parts else SplitAnswer(content=self.text)


class Wishes(Protocol):
    """What the fields of a request say about its answer, in every API family."""

    @property
    def model(self) -> str | None: ...
    @property
    def stream(self) -> bool | None: ...
    @property
    def timeout(self) -> float | None: ...
    @property
    def priority(self) -> int | None: ...
    @property
    def cache_salt(self) -> str | None: ...
    @property
    def max_tokens_policy(self) -> str | None: ...


class Shape(ABC):
    """How an API family writes its answers. The methods that are not abstract write the form of
    OpenAI's chat completions."""

    media_type: bytes = b"text/event-stream; charset=utf-8"
    """The content type of a stream."""

    returns_ids: bool = False
    """Whether the answer has the ids of the prompts' tokens."""

    prompt_ids: Mapping[int, bytes] = MappingProxyType({})
    """These ids by the prompt's index, little-endian int32; set when the prompts are accepted."""

    @abstractmethod
    def whole(self, outputs: list[Output]) -> msgspec.Struct:
        """Return the response body."""

    def opening(self, num_prompt_tokens: int) -> bytes:
        """Return the events before the first text. num_prompt_tokens: those of all prompts."""
        return b""

    @abstractmethod
    def text(self, index: int, reply: TextReply) -> bytes:
        """Return the event for more output of prompt `index`; its text may be empty."""

    @abstractmethod
    def end(self, index: int, end: Finished) -> bytes:
        """Return the event for the end of prompt `index`, after all of its text."""

    def closing(self, ends: list[Finished]) -> bytes:
        """Return the events after the last prompt has ended."""
        return DONE

    def failure(self, error: ErrorBody) -> bytes:
        """Return the last event of a stream that fails."""
        return event(error)


def event(body: msgspec.Struct) -> bytes:
    """Return a server-sent event whose data is `body` as JSON."""
    return b"data: " + _encode(body) + b"\n\n"


class TextEvent:
    """Makes events that differ only in one text; the rest is encoded once."""

    def __init__(self, make: Callable[[str], msgspec.Struct]) -> None:
        marker = secrets.token_hex(16)
        self._head, self._tail = event(make(marker)).split(_encode(marker))

    def __call__(self, text: str) -> bytes:
        return self._head + _encode(text) + self._tail


async def respond(
    request: Request,
    frontend: Frontend,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    asked: Wishes,
    *,
    shape: Shape,
    names: Mapping[str, str],
    num_choices: int = 1,
    warning: str = "",
) -> Response:
    """Submit `prompts` and return the response in `shape`. Raises the refusal of a prompt.

    With max_tokens_policy of `asked` "clamp", `max_tokens` is lowered to what the context leaves.
    After its timeout the call ends with DeadlineExceeded. names: the request's names of fields, by
    the names that the workers use in a refusal. num_choices: of each prompt; output i is choice
    i % num_choices of prompt i // num_choices. warning: the ASCII text of the header `WARNING`, ""
    for none; a lowered `max_tokens` is added.
    """
    key: Key | None = request.scope.get("api_key")
    salt = asked.cache_salt or ""
    namespace = key.namespace(salt) if key else salt
    adapters: Adapters = request.app.state.adapters
    if adapter := adapters.get(asked.model) if asked.model else None:
        namespace = adapter.namespace(namespace)
    answers: dict[str, HeaderAnswer] = request.app.state.by_header
    for header, answer in answers.items():
        if header in request.headers:
            return await answer(request, frontend, prompts, namespace)
    origin = Origin(
        request_id=request.scope["request_id"],
        path=request.scope["path"],
        traceparent=request.headers.get("traceparent"),
        tracestate=request.headers.get("tracestate"),
        key=key,
        address=request.client.host if request.client else "",
    )
    relay: Relay | None = None if adapter else request.scope.get("relay")  # it may differ there
    if relay:
        sampling, shape = relay.seeded(sampling), relay.shape(shape)
    prompts = [prompt for prompt in prompts for _ in range(num_choices)]
    call = frontend.submit(
        prompts,
        sampling,
        asked.priority or 0,
        origin,
        namespace=namespace,
        adapter=adapter,
        num_choices=num_choices,
        is_clamped=asked.max_tokens_policy == "clamp",
        returns_ids=shape.returns_ids,
        outputs=relay.outputs if relay else None,
    )
    call.watcher = asyncio.create_task(_abort_on_disconnect(request.receive, call))
    deadline = Deadline(call, asked.timeout, request.scope) if asked.timeout else None
    try:
        await call.accepted()
        shape.prompt_ids = call.prompt_ids
        if call.max_tokens < (sampling.max_tokens or 0):
            lowered = f"{names.get('max_tokens', 'max_tokens')} lowered to {call.max_tokens}"
            warning = "; ".join(filter(None, (warning, lowered)))
        if asked.stream:
            events = EventStream(call, shape, names, frontend.observer, deadline, warning)
            deadline = None
            return events
        whole = shape.whole(await _collect(call, len(prompts)))
        headers = {WARNING: warning} if warning else None
        return Response(msgspec.json.encode(whole), 200, headers, "application/json")
    except RequestError as error:
        call.abort()
        rename(error, names)
        raise
    except ClientGone:
        return client_left()
    except BaseException:
        call.abort()
        raise
    finally:
        if deadline:
            deadline.cancel()


class Deadline:
    """Ends a call after its timeout. Closes the connection if the client does not read the error.
    Mutable."""

    def __init__(self, call: Call, timeout_s: float, scope: Scope) -> None:
        self._call = call
        self._timeout_s = timeout_s
        self._abort_connection: Callable[[], None] = scope[ABORT_CONNECTION]
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self._expire)

    def cancel(self) -> None:
        self._timer.cancel()

    def _expire(self) -> None:
        self._call.fail(DeadlineExceeded(self._timeout_s))
        # The error comes after the text, so it cannot be sent if the client does not read that.
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(ERROR_READ_S, self._abort_connection)


class EventStream(Response):
    """Sends a call's replies as they come. If the call fails, the error is the last event."""

    def __init__(
        self,
        call: Call,
        shape: Shape,
        names: Mapping[str, str],
        observer: Observer,
        deadline: Deadline | None,
        warning: str,
    ) -> None:
        super().__init__()
        self._names = names
        self._warning = warning
        self._deadline = deadline
        self._observer = observer
        self._call = call
        self._shape = shape

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write(data: bytes, *, more: bool = True) -> None:
            if data or not more:
                await send({"type": "http.response.body", "body": data, "more_body": more})

        try:
            headers = [(b"content-type", self._shape.media_type), *STREAM_HEADERS]
            if self._warning:
                headers.append((WARNING.encode(), self._warning.encode()))
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            # The opening is sent together with the first text.
            lead = self._shape.opening(self._call.num_prompt_tokens)
            ends: dict[int, Finished] = {}
            async for batch in self._call:
                if batch:
                    await write(lead + self._events(batch, ends))
                    lead = b""
                elif self._shape.media_type == Shape.media_type:
                    await write(HOLD_ON)
            in_order = [ends[index] for index in sorted(ends)]
            await write(self._shape.closing(in_order), more=False)
        except ClientGone:
            pass
        except (RequestError, EngineError) as error:
            if isinstance(error, RequestError):
                rename(error, self._names)
            body = error_body(error)[1]
            self._observer.answered(body.error.code)
            await write(self._shape.failure(body), more=False)
        finally:
            self._call.abort()
            if self._deadline:
                self._deadline.cancel()

    def _events(self, batch: Replies, ends: dict[int, Finished]) -> bytes:
        parts = []
        for index, reply in batch:
            if isinstance(reply, TextReply):
                parts.append(self._shape.text(index, reply))
            else:
                parts.append(self._shape.end(index, reply))
                ends[index] = reply
        return b"".join(parts)


async def _collect(call: Call, num_prompts: int) -> list[Output]:
    replies: list[list[TextReply]] = [[] for _ in range(num_prompts)]
    ends: dict[int, Finished] = {}
    async for batch in call:
        for index, reply in batch:
            if isinstance(reply, Finished):
                ends[index] = reply
            else:
                replies[index].append(reply)
    return [Output.of(replies[index], ends[index]) for index in range(num_prompts)]


async def _abort_on_disconnect(receive: Receive, call: Call) -> None:
    """Abort `call` when the client leaves."""
    await wait_for_disconnect(receive)
    call.abort()
