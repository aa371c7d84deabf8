"""The answer of POST /v1/messages, whole or as the named events of a stream."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal

import msgspec

from minisgl.core.answer import Kind, Part, collect
from minisgl.server.api.answers import Timings, TokenLogprob
from minisgl.server.api.messages import new_call_id
from minisgl.server.strict import Json
from minisgl.server.web.errors import ErrorBody
from minisgl_gateway.anthropic.request import MessagesRequest
from minisgl_gateway.chat import End, Form, named_event
from minisgl_gateway.error_forms import ErrorEvent, anthropic_error
from minisgl_gateway.turns import call_input


class MessageUsage(Json, frozen=True, kw_only=True):
    """input_tokens: the prompt's tokens that did not come from the cache."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0

    @classmethod
    def of(cls, end: End) -> MessageUsage:
        return cls(
            input_tokens=end.usage.prompt_tokens - end.num_cached,
            output_tokens=end.usage.completion_tokens,
            cache_read_input_tokens=end.num_cached,
        )


StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


class Ending(Json, frozen=True, kw_only=True):
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None

    @classmethod
    def of(cls, end: End, max_tokens: int, *, has_calls: bool) -> Ending:
        if isinstance(end.stop, str):
            return cls(stop_reason="stop_sequence", stop_sequence=end.stop)
        if not end.is_cut:
            return cls(stop_reason="tool_use" if has_calls else "end_turn")
        is_full = end.usage.completion_tokens < max_tokens
        return cls(stop_reason="model_context_window_exceeded" if is_full else "max_tokens")


class AnswerText(Json, tag_field="type", tag="text", frozen=True, kw_only=True):
    text: str


class AnswerThinking(Json, tag_field="type", tag="thinking", frozen=True, kw_only=True):
    thinking: str
    signature: str = ""


class AnswerToolUse(Json, tag_field="type", tag="tool_use", frozen=True, kw_only=True):
    """A tool call. input: its arguments, as `call_input` returns them."""

    id: str
    name: str
    input: dict[str, Any]


AnswerBlock = AnswerText | AnswerThinking | AnswerToolUse


class AnthropicMessage(Json, tag_field="type", tag="message", frozen=True, kw_only=True):
    id: str
    model: str
    content: list[AnswerBlock]
    usage: MessageUsage
    role: Literal["assistant"] = "assistant"
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    timings: Timings | msgspec.UnsetType = msgspec.UNSET


class _Event(Json, tag_field="type", frozen=True, kw_only=True):
    pass


class MessageStart(_Event, tag="message_start", frozen=True, kw_only=True):
    message: AnthropicMessage


class BlockStart(_Event, tag="content_block_start", frozen=True, kw_only=True):
    index: int
    content_block: AnswerBlock


class TextDelta(Json, tag_field="type", tag="text_delta", frozen=True, kw_only=True):
    text: str


class ThinkingDelta(Json, tag_field="type", tag="thinking_delta", frozen=True, kw_only=True):
    thinking: str


class InputDelta(Json, tag_field="type", tag="input_json_delta", frozen=True, kw_only=True):
    partial_json: str


class BlockDelta(_Event, tag="content_block_delta", frozen=True, kw_only=True):
    index: int
    delta: TextDelta | ThinkingDelta | InputDelta


class BlockStop(_Event, tag="content_block_stop", frozen=True, kw_only=True):
    index: int


class MessageDelta(_Event, tag="message_delta", frozen=True, kw_only=True):
    delta: Ending
    usage: MessageUsage
    timings: Timings | msgspec.UnsetType


class MessageStop(_Event, tag="message_stop", frozen=True, kw_only=True):
    pass


EVENTS: Final = (
    MessageStart,
    BlockStart,
    BlockDelta,
    BlockStop,
    MessageDelta,
    MessageStop,
    ErrorEvent,
)
"""The events of a stream."""


class MessageForm(Form):
    """Writes the answer. Mutable: it keeps the number of blocks, and the kind of the open one."""

    begins_with_count = True

    def __init__(self, model: str, asked: MessagesRequest) -> None:
        self._id = f"msg_{uuid.uuid4().hex}"
        self._model = model
        self._max_tokens = asked.max_tokens
        self._hides_thinking = bool(asked.thinking and asked.thinking.display == "omitted")
        self._open: Kind | None = None
        self._num_blocks = 0
        self._has_calls = False

    def whole(
        self, parts: Sequence[Part], logprobs: list[TokenLogprob], end: End
    ) -> AnthropicMessage:
        answer = collect(parts)
        blocks: list[AnswerBlock] = []
        if answer.reasoning:
            shown = "" if self._hides_thinking else answer.reasoning
            blocks.append(AnswerThinking(thinking=shown))
        if answer.content:
            blocks.append(AnswerText(text=answer.content))
        blocks += [
            AnswerToolUse(id=_tool_id(), name=call.name, input=call_input(call.arguments))
            for call in answer.calls
        ]
        ending = Ending.of(end, self._max_tokens, has_calls=bool(answer.calls))
        return AnthropicMessage(
            id=self._id,
            model=self._model,
            content=blocks,
            usage=MessageUsage.of(end),
            stop_reason=ending.stop_reason,
            stop_sequence=ending.stop_sequence,
            timings=end.timings,
        )

    def opening(self, num_prompt_tokens: int) -> bytes:
        message = AnthropicMessage(
            id=self._id,
            model=self._model,
            content=[],
            usage=MessageUsage(input_tokens=num_prompt_tokens, output_tokens=0),
        )
        return _framed(MessageStart(message=message))

    def text(self, parts: Sequence[Part], logprobs: list[TokenLogprob]) -> bytes:
        return b"".join(event for part in parts for event in self._part(*part))

    def _part(self, kind: Kind, text: str) -> Iterator[bytes]:
        if kind == "call" or kind not in ("arguments", self._open):  # arguments continue a call
            yield from self._begin(kind, text)
        delta: TextDelta | ThinkingDelta | InputDelta
        if kind == "call" or (kind == "reasoning" and self._hides_thinking):
            return
        if kind == "content":
            delta = TextDelta(text=text)
        elif kind == "reasoning":
            delta = ThinkingDelta(thinking=text)
        else:
            delta = InputDelta(partial_json=text)
        yield _framed(BlockDelta(index=self._num_blocks - 1, delta=delta))

    def _begin(self, kind: Kind, text: str) -> Iterator[bytes]:
        """End the open block and begin another. text: the tool's name, if it is a call."""
        yield from self._end_block()
        block: AnswerBlock = AnswerText(text="")
        if kind == "reasoning":
            block = AnswerThinking(thinking="")
        elif kind == "call":
            self._has_calls = True
            block = AnswerToolUse(id=_tool_id(), name=text, input={})
        self._open = kind
        self._num_blocks += 1
        yield _framed(BlockStart(index=self._num_blocks - 1, content_block=block))

    def _end_block(self) -> Iterator[bytes]:
        if self._open is not None:
            yield _framed(BlockStop(index=self._num_blocks - 1))
        self._open = None

    def end(self, end: End) -> bytes:
        delta = MessageDelta(
            delta=Ending.of(end, self._max_tokens, has_calls=self._has_calls),
            usage=MessageUsage.of(end),
            timings=end.timings,
        )
        return b"".join(self._end_block()) + _framed(delta) + _framed(MessageStop())

    def failure(self, error: ErrorBody) -> bytes:
        return _framed(anthropic_error(error))


def _framed(body: msgspec.Struct) -> bytes:
    return named_event(str(body.__struct_config__.tag), body)


def _tool_id() -> str:
    return f"toolu_{new_call_id()}"
