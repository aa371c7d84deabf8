"""POST /v1/responses: OpenAI's Responses.

A request becomes a `ChatRequest`, so prompts and options are those of chat completions. Answers are
kept in memory (`ResponseStore`), for `previous_response_id` and GET /v1/responses/{id}.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, Self

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import UNSET, UnsetType, field

from minisgl.core import Finished, SamplingParams
from minisgl.message import TextReply
from minisgl.server import body
from minisgl.server.api.logprobs import ChatLogprobs, TokenLogprob
from minisgl.server.api.messages import Message, ToolCall, ToolFunction
from minisgl.server.api.models import ServedModel
from minisgl.server.api.response_store import ResponseStore
from minisgl.server.api.responses_request import FORMAT_NAMES, ResponsesRequest
from minisgl.server.api.schema import ErrorBody, Json, Timings
from minisgl.server.api.structured import in_turn, naming
from minisgl.server.api.tools import new_call_id
from minisgl.server.frontend import Frontend
from minisgl.server.openapi import operation
from minisgl.server.respond import Output, Shape, named_event, respond
from minisgl.tokenizer.parse.answer import Kind, Part

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


class ReasoningText(Json, tag_field="type", tag="reasoning_text", frozen=True, kw_only=True):
    text: str


class ReasoningItem(Json, tag_field="type", tag="reasoning", frozen=True, kw_only=True):
    id: str
    status: ItemStatus
    content: list[ReasoningText]
    summary: list[Any] = field(default_factory=list)


class FunctionCall(Json, tag_field="type", tag="function_call", frozen=True, kw_only=True):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


OutputItem = OutputMessage | ReasoningItem | FunctionCall


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
            output_tokens_details=OutputDetails(reasoning_tokens=end.num_reasoning_tokens),
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
    output: list[OutputItem] = field(default_factory=list)
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
    item: OutputItem


class ItemDone(_OfItem, tag="response.output_item.done", frozen=True, kw_only=True):
    item: OutputItem


class _OfPart(_OfItem, frozen=True, kw_only=True):
    item_id: str
    content_index: int = 0


class PartAdded(_OfPart, tag="response.content_part.added", frozen=True, kw_only=True):
    part: OutputText | ReasoningText


class PartDone(_OfPart, tag="response.content_part.done", frozen=True, kw_only=True):
    part: OutputText | ReasoningText


class OutputTextDelta(_OfPart, tag="response.output_text.delta", frozen=True, kw_only=True):
    delta: str
    logprobs: list[TokenLogprob] = field(default_factory=list)


class OutputTextDone(_OfPart, tag="response.output_text.done", frozen=True, kw_only=True):
    text: str
    logprobs: list[TokenLogprob] = field(default_factory=list)


class ReasoningDelta(_OfPart, tag="response.reasoning_text.delta", frozen=True, kw_only=True):
    delta: str


class ReasoningDone(_OfPart, tag="response.reasoning_text.done", frozen=True, kw_only=True):
    text: str


class _OfCall(_OfItem, frozen=True, kw_only=True):
    item_id: str


class ArgumentsDelta(
    _OfCall, tag="response.function_call_arguments.delta", frozen=True, kw_only=True
):
    delta: str


class ArgumentsDone(
    _OfCall, tag="response.function_call_arguments.done", frozen=True, kw_only=True
):
    arguments: str
    name: str


EVENTS: Final = (
    *(ResponseCreated, ResponseInProgress, ResponseCompleted, ResponseIncomplete, ResponseFailed),
    *(ItemAdded, ItemDone, PartAdded, PartDone, OutputTextDelta, OutputTextDone),
    *(ReasoningDelta, ReasoningDone, ArgumentsDelta, ArgumentsDone),
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
                spoken = _spoken(answer.output)
                store.put(begun.id, owner, [*earlier, *asked.messages, spoken], answer)

        return await respond(
            request,
            frontend,
            [chat.split_prompt],
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


def _spoken(items: Sequence[OutputItem]) -> Message:
    """The answer as a message of a chat."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for item in items:
        if isinstance(item, FunctionCall):
            function = ToolFunction(name=item.name, arguments=item.arguments)
            calls.append(ToolCall(id=item.call_id, function=function))
        else:
            text = "".join(part.text for part in item.content)
            (texts if isinstance(item, OutputMessage) else thoughts).append(text)
    return Message(
        role="assistant",
        content="".join(texts) or (None if calls else ""),
        reasoning_content="".join(thoughts) or None,
        tool_calls=calls or None,
    )


class _ResponseShape(Shape):
    """Mutable: the items so far, and the number of the next event.

    A whole answer is made as a stream whose events nobody sees.
    """

    def __init__(
        self,
        begun: ResponseObject,
        keep: Callable[[ResponseObject], None],
        *,
        has_logprobs: bool,
    ) -> None:
        """keep: called with the answer when it is complete."""
        self._begun = begun
        self._keep = keep
        self._has_logprobs = has_logprobs
        self._items: list[OutputItem] = []
        self._is_open = False
        self._num_events = 0
        self._ended: ResponseObject | None = None

    def whole(self, outputs: list[Output]) -> ResponseObject:
        (output,) = outputs
        parts: list[Part] = [*output.parts] or [("content", output.text)]
        self._add(parts, self._logprobs_of(output))
        self.end(0, output.end)
        assert self._ended is not None, "its end has just come"
        return self._ended

    def opening(self, num_prompt_tokens: int) -> bytes:
        created = self._event(ResponseCreated, response=self._begun)
        return created + self._event(ResponseInProgress, response=self._begun)

    def text(self, index: int, reply: TextReply) -> bytes:
        logprobs = self._logprobs_of(reply)
        parts: list[Part] = [*reply.parts]
        if not parts and (reply.text or logprobs):
            parts = [("content", reply.text)]
        return self._add(parts, logprobs)

    def end(self, index: int, end: Finished) -> bytes:
        is_cut = end.reason == "length"
        status: ItemStatus = "incomplete" if is_cut else "completed"
        events = b""
        if not self._items:
            events += self._begin("content", "")
        events += self._close(status)
        self._ended = msgspec.structs.replace(
            self._begun,
            status=status,
            output=self._items,
            incomplete_details=Incomplete() if is_cut else None,
            usage=ResponseUsage.of(end),
            timings=Timings.of([end]),
        )
        self._keep(self._ended)
        return events

    def closing(self, ends: list[Finished]) -> bytes:
        assert self._ended is not None, "the only output has ended"
        kind = ResponseCompleted if self._ended.status == "completed" else ResponseIncomplete
        return self._event(kind, response=self._ended)

    def failure(self, error: ErrorBody) -> bytes:
        failed = ResponseFailure(code=error.error.code, message=error.error.message)
        answer = msgspec.structs.replace(self._begun, status="failed", error=failed)
        return self._event(ResponseFailed, response=answer)

    def _add(self, parts: Sequence[Part], logprobs: list[TokenLogprob]) -> bytes:
        """Append to the items. Returns the events. logprobs: of all tokens of the parts; they are
        the content's, or nothing's."""
        events = []
        for kind, text in parts:
            item = self._items[-1] if self._is_open else None
            if kind == "call" or not isinstance(item, _ITEMS[kind]):
                events.append(self._begin(kind, text))
            if kind == "content":
                events.append(self._add_content(text, logprobs))
                logprobs = []
            elif kind == "reasoning":
                events.append(self._add_reasoning(text))
            elif kind == "arguments":
                events.append(self._add_arguments(text))
        return b"".join(events)

    def _begin(self, kind: Kind, text: str) -> bytes:
        """Complete the open item and begin one. text: the name of a function that is called."""
        events = self._close("completed")
        number = uuid.uuid4().hex
        item: OutputItem
        part: OutputText | ReasoningText | None = None
        if kind == "call":
            item = FunctionCall(
                id=f"fc_{number}",
                call_id=new_call_id(),
                name=text,
                arguments="",
                status="in_progress",
            )
        elif kind == "reasoning":
            part = ReasoningText(text="")
            item = ReasoningItem(id=f"rs_{number}", content=[part], status="in_progress")
        else:
            part = OutputText(text="")
            item = OutputMessage(id=f"msg_{number}", content=[part], status="in_progress")
        self._items.append(item)
        self._is_open = True
        shown = msgspec.structs.replace(item, content=[]) if part else item
        events += self._event(ItemAdded, item=shown, output_index=self._index)
        return events + (self._of_item(PartAdded, part=part) if part else b"")

    @property
    def _index(self) -> int:
        return len(self._items) - 1

    def _add_content(self, text: str, logprobs: list[TokenLogprob]) -> bytes:
        item = self._items[-1]
        assert isinstance(item, OutputMessage)
        (part,) = item.content
        part = OutputText(text=part.text + text, logprobs=[*part.logprobs, *logprobs])
        self._items[-1] = msgspec.structs.replace(item, content=[part])
        return self._of_item(OutputTextDelta, delta=text, logprobs=logprobs)

    def _add_reasoning(self, text: str) -> bytes:
        item = self._items[-1]
        assert isinstance(item, ReasoningItem)
        part = ReasoningText(text=item.content[0].text + text)
        self._items[-1] = msgspec.structs.replace(item, content=[part])
        return self._of_item(ReasoningDelta, delta=text)

    def _add_arguments(self, text: str) -> bytes:
        item = self._items[-1]
        assert isinstance(item, FunctionCall)
        self._items[-1] = msgspec.structs.replace(item, arguments=item.arguments + text)
        return self._of_item(ArgumentsDelta, delta=text)

    def _close(self, status: ItemStatus) -> bytes:
        """Complete the open item, if there is one."""
        if not self._is_open:
            return b""
        item = self._items[-1] = msgspec.structs.replace(self._items[-1], status=status)
        if isinstance(item, FunctionCall):
            events = self._of_item(ArgumentsDone, arguments=item.arguments, name=item.name)
        else:
            (part,) = item.content
            if isinstance(part, OutputText):
                done = {"text": part.text, "logprobs": part.logprobs}
                events = self._of_item(OutputTextDone, **done)
            else:
                events = self._of_item(ReasoningDone, text=part.text)
            events += self._of_item(PartDone, part=part)
        self._is_open = False
        return events + self._event(ItemDone, item=item, output_index=self._index)

    def _logprobs_of(self, output: Output | TextReply) -> list[TokenLogprob]:
        if not self._has_logprobs:
            return []
        return ChatLogprobs.of(output.tokens, output.logprobs or []).content

    def _of_item(self, kind: type[_Numbered], **fields: Any) -> bytes:
        id = self._items[-1].id
        return self._event(kind, item_id=id, output_index=self._index, **fields)

    def _event(self, kind: type[_Numbered], **fields: Any) -> bytes:
        numbered = kind(sequence_number=self._num_events, **fields)
        self._num_events += 1
        return named_event(str(kind.__struct_config__.tag), numbered)


_ITEMS: Final[dict[Kind, type[OutputItem]]] = {
    "content": OutputMessage,
    "reasoning": ReasoningItem,
    "arguments": FunctionCall,
}
