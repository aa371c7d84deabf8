"""The records of an answer of POST /v1/responses: the object, its items, its events."""

from __future__ import annotations

import time
import uuid
from typing import Any, Final, Literal, Self

from msgspec import UNSET, UnsetType, field

from minisgl.server.api.answers import Timings, TokenLogprob
from minisgl.server.strict import Json
from minisgl_gateway.chat import End, Model
from minisgl_gateway.responses.request import ResponsesRequest
from minisgl_gateway.responses.tools import NameChoice

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
    namespace: str | UnsetType = UNSET


class CustomCall(Json, tag_field="type", tag="custom_tool_call", frozen=True, kw_only=True):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    input: str
    namespace: str | UnsetType = UNSET


OutputItem = OutputMessage | ReasoningItem | FunctionCall | CustomCall


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
    def of(cls, end: End) -> Self:
        usage = end.usage
        return cls(
            input_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens,
            total_tokens=usage.total_tokens,
            input_tokens_details=InputDetails(cached_tokens=end.num_cached),
            output_tokens_details=OutputDetails(reasoning_tokens=end.num_reasoning),
        )


class Incomplete(Json, frozen=True, kw_only=True):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseFailure(Json, frozen=True, kw_only=True):
    code: str
    message: str


class ResponseObject(Json, frozen=True, kw_only=True):
    """The answer. The fields after `timings` are the request's, with the values that were used."""

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
    tool_choice: NameChoice
    parallel_tool_calls: bool
    text: dict[str, Any]
    reasoning: dict[str, Any]
    truncation: Literal["disabled"] = "disabled"
    background: Literal[False] = False
    object: Literal["response"] = "response"

    @classmethod
    def begun(cls, model: Model, asked: ResponsesRequest) -> Self:
        """Return the answer before its first token."""
        options, reasoning = asked.text, asked.reasoning
        return cls(
            id=f"resp_{uuid.uuid4().hex}",
            created_at=int(time.time()),
            model=model.name,
            instructions=asked.instructions,
            max_output_tokens=asked.max_output_tokens,
            metadata=asked.metadata or {},
            previous_response_id=asked.previous_response_id,
            temperature=model.given_or_default("temperature", asked.temperature),
            top_p=model.given_or_default("top_p", asked.top_p),
            top_logprobs=asked.top_logprobs or 0,
            store=asked.store is not False,
            tools=asked.offered.given,
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


class NumberedEvent(Json, tag_field="type", frozen=True, kw_only=True):
    sequence_number: int


class _OfResponse(NumberedEvent, frozen=True, kw_only=True):
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


class _OfItem(NumberedEvent, frozen=True, kw_only=True):
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


class CustomInputDelta(
    _OfCall, tag="response.custom_tool_call_input.delta", frozen=True, kw_only=True
):
    delta: str


class CustomInputDone(
    _OfCall, tag="response.custom_tool_call_input.done", frozen=True, kw_only=True
):
    input: str


EVENTS: Final = (
    *(ResponseCreated, ResponseInProgress, ResponseCompleted, ResponseIncomplete, ResponseFailed),
    *(ItemAdded, ItemDone, PartAdded, PartDone, OutputTextDelta, OutputTextDone),
    *(ReasoningDelta, ReasoningDone, ArgumentsDelta, ArgumentsDone),
    *(CustomInputDelta, CustomInputDone),
)
"""The events of a stream."""
