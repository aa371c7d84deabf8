"""The answers of POST /v1/chat/completions, whole and as chunks of a stream."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, UnsetType

from minisgl.core import FinishReason
from minisgl.server.api.answers import ChatLogprobs, PromptLogprob, Timings, Usage
from minisgl.server.api.messages import AnswerCall, CallDelta, answer_calls
from minisgl.server.strict import Json
from minisgl.server.web.respond import Output


class AnswerMessage(Json, frozen=True, kw_only=True):
    """The message of an answer. content: None if there are only tool calls."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[AnswerCall] | UnsetType = UNSET

    @classmethod
    def of(cls, output: Output) -> AnswerMessage:
        answer = output.answer
        return cls(
            content=None if answer.calls and not answer.content else answer.content,
            reasoning_content=answer.reasoning or UNSET,
            tool_calls=answer_calls(answer.calls) or UNSET,
        )


ChatFinishReason = FinishReason | Literal["tool_calls"]


class ChatChoice(Json, frozen=True, kw_only=True):
    """stop_reason: the stop string or stop token id that ended the answer, else null."""

    index: int
    message: AnswerMessage
    finish_reason: ChatFinishReason
    stop_reason: str | int | None
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Json, frozen=True, kw_only=True):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    prompt_logprobs: list[PromptLogprob] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    usage: Usage
    timings: Timings
    object: Literal["chat.completion"] = "chat.completion"


class Delta(Json, omit_defaults=True, frozen=True, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET


class ChunkChoice(Json, frozen=True, kw_only=True):
    index: int
    delta: Delta
    finish_reason: ChatFinishReason | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(Json, frozen=True, kw_only=True):
    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    prompt_logprobs: list[PromptLogprob] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    usage: Usage | UnsetType | None = UNSET
    timings: Timings | UnsetType = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
