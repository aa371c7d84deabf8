"""POST /v1/responses: OpenAI's Responses.

A request becomes a `ChatRequest`, so prompts and options are those of chat completions. Answers are
kept in memory (`ResponseStore`), for `previous_response_id` and GET /v1/responses/{id}.
"""

from __future__ import annotations

import time
import uuid
from typing import Any, Final, Literal, Self

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import UNSET, UnsetType, field

from minisgl.core import Finished, SamplingParams
from minisgl.message import TextReply
from minisgl.server import body
from minisgl.server.api.logprobs import ChatLogprobs, TokenLogprob
from minisgl.server.api.messages import Message
from minisgl.server.api.models import ServedModel
from minisgl.server.api.response_store import ResponseStore
from minisgl.server.api.responses_request import FORMAT_NAMES, ResponsesRequest
from minisgl.server.api.schema import ErrorBody, Json, Timings
from minisgl.server.api.structured import in_turn, naming
from minisgl.server.frontend import Frontend
from minisgl.server.openapi import operation
from minisgl.server.respond import Output, Shape, named_event, respond

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(Json, tag_field="type", tag="output_text", frozen=True, kw_only=True):
    text: str
    annotations: list[Any] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)


class OutputMessage(Json, tag_field="type", tag="message", frozen=True, kw_only=True):
    id: str
    status: ItemStatus
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class InputDetails(Json, frozen=True, kw_only=True):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(Json, frozen=True, kw_only=True):
    reasoning_tokens: int = 0


class ResponseUsage(Json, frozen=True, kw_only=True):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: InputDetails
    output_tokens_details: OutputDetails

    @classmethod
    def of(cls, end: Finished) -> Self:
        return cls(
            input_tokens=end.num_prompt_tokens,
            output_tokens=end.num_output_tokens,
            total_tokens=end.num_prompt_tokens + end.num_output_tokens,
            input_tokens_details=InputDetails(cached_tokens=end.num_cached_tokens),
            output_tokens_details=OutputDetails(),
        )


class Incomplete(Json, frozen=True, kw_only=True):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseFailure(Json, frozen=True, kw_only=True):
    code: str
    message: str


class ResponseObject(Json, frozen=True, kw_only=True):
    """The answer. What follows `usage` repeats the request, with the values that were used."""

    id: str
    created_at: int
    model: str
    status: Literal["in_progress", "completed", "incomplete", "failed"] = "in_progress"
    output: list[OutputMessage] = field(default_factory=list)
    error: ResponseFailure | None = None
    incomplete_details: Incomplete | None = None
    usage: ResponseUsage | None = None
    timings: Timings | UnsetType = UNSET
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    previous_response_id: str | None
    temperature: float
    top_p: float
    top_logprobs: int
    store: bool
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    text: dict[str, Any]
    reasoning: dict[str, Any]
    truncation: Literal["disabled"] = "disabled"
    background: Literal[False] = False
    object: Literal["response"] = "response"

    @classmethod
    def begun(cls, model: str, asked: ResponsesRequest, sampling: SamplingParams) -> Self:
        """The answer before its first token."""
        options, reasoning = asked.text, asked.reasoning
        return cls(
            id=f"resp_{uuid.uuid4().hex}",
            created_at=int(time.time()),
            model=model,
            instructions=asked.instructions,
            max_output_tokens=asked.max_output_tokens,
            metadata=asked.metadata or {},
            previous_response_id=asked.previous_response_id,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_logprobs=asked.top_logprobs or 0,
            store=asked.store is not False,
            tools=asked.tools or [],
            tool_choice=asked.tool_choice or "auto",
            parallel_tool_calls=asked.parallel_tool_calls is not False,
            text={
                "format": (options and options.format) or {"type": "text"},
                "verbosity": (options and options.verbosity) or "medium",
            },
            reasoning={
                "effort": reasoning and reasoning.effort,
                "summary": reasoning and reasoning.summary,
            },
        )


class _Numbered(Json, tag_field="type", frozen=True, kw_only=True):
    sequence_number: int


class _OfResponse(_Numbered, frozen=True, kw_only=True):
    response: ResponseObject


class ResponseCreated(_OfResponse, tag="response.created", frozen=True, kw_only=True):
    pass


class ResponseInProgress(_OfResponse, tag="response.in_progress", frozen=True, kw_only=True):
    pass


class ResponseCompleted(_OfResponse, tag="response.completed", frozen=True, kw_only=True):
    pass


class ResponseIncomplete(_OfResponse, tag="response.incomplete", frozen=True, kw_only=True):
    pass


class ResponseFailed(_OfResponse, tag="response.failed", frozen=True, kw_only=True):
    pass


class _OfItem(_Numbered, frozen=True, kw_only=True):
    output_index: int = 0


class ItemAdded(_OfItem, tag="response.output_item.added", frozen=True, kw_only=True):
    item: OutputMessage


class ItemDone(_OfItem, tag="response.output_item.done", frozen=True, kw_only=True):
    item: OutputMessage


class _OfPart(_OfItem, frozen=True, kw_only=True):
    item_id: str
    content_index: int = 0


class PartAdded(_OfPart, tag="response.content_part.added", frozen=True, kw_only=True):
    part: OutputText


class PartDone(_OfPart, tag="response.content_part.done", frozen=True, kw_only=True):
    part: OutputText


class OutputTextDelta(_OfPart, tag="response.output_text.delta", frozen=True, kw_only=True):
    delta: str
    logprobs: list[TokenLogprob] = field(default_factory=list)


class OutputTextDone(_OfPart, tag="response.output_text.done", frozen=True, kw_only=True):
    text: str
    logprobs: list[TokenLogprob] = field(default_factory=list)


EVENTS: Final = (
    *(ResponseCreated, ResponseInProgress, ResponseCompleted, ResponseIncomplete, ResponseFailed),
    *(ItemAdded, ItemDone, PartAdded, PartDone, OutputTextDelta, OutputTextDone),
)
"""Of a stream."""


class Deleted(Json, frozen=True, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


RECORDS: Final = (ResponsesRequest, ResponseObject, Deleted, *EVENTS)
"""The roots of this family's schema in /openapi.json."""


def router(frontend: Frontend, model: ServedModel) -> APIRouter:
    routes = APIRouter()
    store = ResponseStore()

    @routes.post("/v1/responses", **operation(ResponsesRequest, ResponseObject, *EVENTS))
    async def responses(request: Request) -> Response:
        """Continue a conversation; OpenAI's schema of Responses."""
        asked = await body.read(request, ResponsesRequest)
        name = model.check(asked.model)
        owner, earlier = _owner(request), []
        if id := asked.previous_response_id:
            earlier = store.get(id, owner, param="previous_response_id", status=400).messages
        chat = asked.chat(earlier)
        with naming(FORMAT_NAMES):
            sampling, names = chat.with_form(chat.sampling(model.defaults))
        begun = ResponseObject.begun(name, asked, sampling)

        def keep(answer: ResponseObject) -> None:
            if asked.store is not False:
                spoken = [_message(item) for item in answer.output]
                store.put(begun.id, owner, [*earlier, *asked.messages, *spoken], answer)

        return await respond(
            request,
            frontend,
            [chat.prompt],
            sampling,
            priority=None,
            cache_salt=None,
            stream=asked.stream,
            shape=_ResponseShape(begun, keep, has_logprobs=asked.has_logprobs),
            names={
                "prompt": "input",
                "max_tokens": "max_output_tokens",
                **in_turn(names, FORMAT_NAMES),
            },
        )

    @routes.get("/v1/responses/{id}", **operation(None, ResponseObject))
    async def retrieve(id: str, request: Request) -> Response:
        """An answer that is still kept."""
        return _json(store.get(id, _owner(request)).answer)

    @routes.delete("/v1/responses/{id}", **operation(None, Deleted))
    async def delete(id: str, request: Request) -> Response:
        """Forget an answer."""
        store.delete(id, _owner(request))
        return _json(Deleted(id=id))

    return routes


def _owner(request: Request) -> str:
    key = request.scope.get("api_key")
    return key.name if key else ""


def _json(struct: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(struct), media_type="application/json")


def _message(item: OutputMessage) -> Message:
    return Message(role="assistant", content="".join(part.text for part in item.content))


class _ResponseShape(Shape):
    """Mutable: the text so far, and the number of the next event."""

    def __init__(self, begun: ResponseObject, keep: Any, *, has_logprobs: bool) -> None:
        """keep: called with the answer when it is complete."""
        self._begun = begun
        self._keep = keep
        self._has_logprobs = has_logprobs
        self._item_id = f"msg_{uuid.uuid4().hex}"
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._num_events = 0
        self._ended: ResponseObject | None = None

    def whole(self, outputs: list[Output]) -> ResponseObject:
        (output,) = outputs
        self._texts, self._logprobs = [output.text], self._logprobs_of(output)
        return self._complete(output.end)

    def opening(self, num_prompt_tokens: int) -> bytes:
        part = OutputText(text="")
        return b"".join(
            (
                self._event(ResponseCreated, response=self._begun),
                self._event(ResponseInProgress, response=self._begun),
                self._event(ItemAdded, item=self._item("in_progress", content=[])),
                self._event(PartAdded, item_id=self._item_id, part=part),
            )
        )

    def text(self, index: int, reply: TextReply) -> bytes:
        logprobs = self._logprobs_of(reply)
        if not reply.text and not logprobs:
            return b""
        self._texts.append(reply.text)
        self._logprobs += logprobs
        return self._event(
            OutputTextDelta, item_id=self._item_id, delta=reply.text, logprobs=logprobs
        )

    def end(self, index: int, end: Finished) -> bytes:
        answer = self._ended = self._complete(end)
        (item,) = answer.output
        (part,) = item.content
        done = {"text": part.text, "logprobs": part.logprobs}
        return b"".join(
            (
                self._event(OutputTextDone, item_id=item.id, **done),
                self._event(PartDone, item_id=item.id, part=part),
                self._event(ItemDone, item=item),
            )
        )

    def closing(self, ends: list[Finished]) -> bytes:
        assert self._ended is not None, "the only output has ended"
        kind = ResponseCompleted if self._ended.status == "completed" else ResponseIncomplete
        return self._event(kind, response=self._ended)

    def failure(self, error: ErrorBody) -> bytes:
        failed = ResponseFailure(code=error.error.code, message=error.error.message)
        answer = msgspec.structs.replace(self._begun, status="failed", error=failed)
        return self._event(ResponseFailed, response=answer)

    def _complete(self, end: Finished) -> ResponseObject:
        is_cut = end.reason == "length"
        status: ItemStatus = "incomplete" if is_cut else "completed"
        part = OutputText(text="".join(self._texts), logprobs=self._logprobs)
        answer = msgspec.structs.replace(
            self._begun,
            status=status,
            output=[self._item(status, content=[part])],
            incomplete_details=Incomplete() if is_cut else None,
            usage=ResponseUsage.of(end),
            timings=Timings.of([end]),
        )
        self._keep(answer)
        return answer

    def _item(self, status: ItemStatus, content: list[OutputText]) -> OutputMessage:
        return OutputMessage(id=self._item_id, status=status, content=content)

    def _logprobs_of(self, output: Output | TextReply) -> list[TokenLogprob]:
        if not self._has_logprobs:
            return []
        return ChatLogprobs.of(output.tokens, output.logprobs or []).content

    def _event(self, kind: type[_Numbered], **fields: Any) -> bytes:
        numbered = kind(sequence_number=self._num_events, **fields)
        self._num_events += 1
        return named_event(str(kind.__struct_config__.tag), numbered)
