"""Requests to a server of OpenAI's API, and its answers.

Answers are read leniently, because servers add fields of their own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, Final, NamedTuple

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from minisgl.core.answer import Part
from minisgl.errors import EngineError, RequestError
from minisgl.server.api.answers import (
    CompletionTokensDetails,
    PromptTokensDetails,
    Timings,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from minisgl.server.api.chat import ChatRequest
from minisgl_gateway.chat import End

PLAIN: Final = frozenset(
    ("model", "messages", "stream", "max_tokens", "temperature", "top_p", "seed", "stop",
     "presence_penalty", "frequency_penalty", "logprobs", "top_logprobs", "response_format",
     "reasoning_effort", "tools", "tool_choice", "parallel_tool_calls")
)  # fmt: skip
"""The fields that OpenAI documents, of those that doors set."""

_OF_TOOLS: Final = ("tools", "tool_choice", "parallel_tool_calls")
_THOUGHTS: Final = "reasoning_content"
TEMPLATE_ARGS: Final = "chat_template_kwargs"


class UpstreamFailed(EngineError):
    """The upstream cannot be reached, ended within its answer, or answers something else."""

    code = "upstream_failed"
    status = 502


class UpstreamError(EngineError):
    """An upstream's own failure. retry_after_s: what it asks for."""

    retry_after_s: float = 1


class UpstreamRefusal(RequestError):
    """An upstream's refusal of a request. retry_after_s: what it asks for."""

    retry_after_s: float = 1


def fields_of(chat: ChatRequest, model: str) -> dict[str, Any]:
    """Return the fields that are given, under OpenAI's names."""
    fields: dict[str, Any] = _given(msgspec.to_builtins(chat))
    fields["model"] = model
    fields["messages"] = [_given(message) for message in fields.get("messages", ())]
    for message in fields["messages"]:
        for call in message.get("tool_calls", ()):
            call.pop("index", None)
            call["function"].pop("parsed_arguments", None)
    if form := fields.get("response_format"):
        fields["response_format"] = _given(form)
        if form.get("json_schema"):
            schema = _given(form["json_schema"])
            fields["response_format"]["json_schema"] = {"name": "answer", **schema}
    if not fields.get("tools"):
        for name in _OF_TOOLS:
            fields.pop(name, None)
    return fields


def plain(fields: dict[str, Any], further: Collection[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the fields that every server of OpenAI's API takes, and the names of the others.

    further: names of fields that this server takes, too.
    """
    fields = dict(fields)
    fields.pop("max_tokens_policy", None)  # a door's wish, not the client's
    if TEMPLATE_ARGS in further:
        _into_template_args(fields, "enable_thinking")
    kept = {name: value for name, value in fields.items() if name in PLAIN or name in further}
    left_out = [name for name in fields if name not in kept]
    if any(_THOUGHTS in message for message in kept["messages"]) and _THOUGHTS not in further:
        left_out.append(f"messages.{_THOUGHTS}")
        kept["messages"] = [
            {name: value for name, value in message.items() if name != _THOUGHTS}
            for message in kept["messages"]
        ]
    return kept, left_out


def tokenize_fields(chat: ChatRequest, model: str) -> dict[str, Any]:
    """Return a request to POST /tokenize with the same prompt."""
    fields = fields_of(chat, model)
    _into_template_args(fields, "enable_thinking", "reasoning_effort")
    if chat.tool_choice == "none":
        fields.pop("tools", None)
    names = ("model", "messages", "tools", TEMPLATE_ARGS, "continue_final_message")
    return {name: fields[name] for name in names if name in fields}


def _into_template_args(fields: dict[str, Any], *names: str) -> None:
    """Move fields into `chat_template_kwargs`, where more servers take them."""
    args = {name: fields.pop(name) for name in names if name in fields}
    if args:
        fields[TEMPLATE_ARGS] = fields.get(TEMPLATE_ARGS, {}) | args


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


class _Function(Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(Struct):
    id: str | None = None
    index: Annotated[int, Meta(ge=0)] | None = None
    function: _Function | None = None


class _Message(Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_Call] | None = None


class _Top(Struct):
    token: str
    logprob: float
    bytes: list[int] | None = None


class _Token(_Top):
    top_logprobs: list[_Top] | None = None


class _Logprobs(Struct):
    content: list[_Token] | None = None


class _Choice(Struct):
    """delta: of a stream. message: of a whole answer. text: of a text completion."""

    delta: _Message | None = None
    message: _Message | None = None
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: _Logprobs | None = None


class _Cached(Struct):
    cached_tokens: int | None = None


class _Reasoned(Struct):
    reasoning_tokens: int | None = None


class _Usage(Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Cached | None = None
    completion_tokens_details: _Reasoned | None = None

    @property
    def usage(self) -> Usage:
        cached, reasoned = self.prompt_tokens_details, self.completion_tokens_details
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            total_tokens=self.prompt_tokens + self.completion_tokens,
            prompt_tokens_details=PromptTokensDetails(
                cached_tokens=(cached and cached.cached_tokens) or 0
            ),
            completion_tokens_details=CompletionTokensDetails(
                reasoning_tokens=(reasoned and reasoned.reasoning_tokens) or 0
            ),
        )


class _Answer(Struct):
    """A whole answer, or a chunk of a stream."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    timings: Any = None
    error: Any = None


class _Error(Struct):
    message: str
    param: str | None = None
    code: str | int | None = None


class Piece(NamedTuple):
    parts: list[Part]
    logprobs: list[TokenLogprob]


class Reader:
    """Reads one answer. Mutable: it keeps what the end of the answer needs.

    num_prompt_tokens: 0 while it is unknown.
    """

    def __init__(self) -> None:
        self._finish: str | None = None
        self._stop: str | int | None = None
        self._usage = _Usage()
        self._timings: Timings | UnsetType = UNSET
        self._indices: list[int | None] = []  # of the calls; the first may be any number
        self._ids: list[str | None] = []

    @property
    def num_prompt_tokens(self) -> int:
        return self._usage.prompt_tokens

    def read(self, data: bytes) -> Piece:
        """Return what a whole answer or a chunk has.

        Raises UpstreamFailed for something else, and the upstream's error.
        """
        try:
            answer = msgspec.json.decode(data, type=_Answer)
            if answer.error:
                raise _error(500, answer.error)
            self._usage = answer.usage or self._usage
            if answer.timings:
                self._timings = _timings(answer.timings)
            return self._choice(answer.choices[0]) if answer.choices else Piece([], [])
        except msgspec.DecodeError as error:
            raise UpstreamFailed(
                f"the upstream's answer is not one of chat completions ({error})"
            ) from None

    def end(self) -> End:
        """Return the end. Raises UpstreamFailed if it has not come."""
        if self._finish is None:
            raise UpstreamFailed("the upstream ended within its answer; try again")
        return End(
            is_cut=self._finish == "length",
            stop=self._stop,
            usage=self._usage.usage,
            timings=self._timings,
        )

    def _choice(self, choice: _Choice) -> Piece:
        self._finish = choice.finish_reason or self._finish
        self._stop = self._stop if choice.stop_reason is None else choice.stop_reason
        message = choice.delta or choice.message or _Message(content=choice.text)
        parts: list[Part] = []
        if thoughts := message.reasoning_content or message.reasoning:
            parts.append(("reasoning", thoughts))
        if message.content:
            parts.append(("content", message.content))
        for call in message.tool_calls or ():
            parts += self._call(call)
        found = (choice.logprobs and choice.logprobs.content) or ()
        return Piece(parts, [_token(token) for token in found])

    def _call(self, call: _Call) -> list[Part]:
        function = call.function or _Function()
        parts: list[Part] = []
        is_next = function.name and call.id and call.id not in self._ids  # as Ollama's, all at 0
        if call.index is None or call.index not in self._indices or is_next:
            self._indices.append(call.index)
            self._ids.append(call.id)
            parts.append(("call", function.name or ""))
        elif call.index != self._indices[-1]:
            raise UpstreamFailed("the upstream mixes the pieces of two tool calls")
        if function.arguments:
            parts.append(("arguments", function.arguments))
        return parts


def _timings(value: Any) -> Timings | UnsetType:
    """Return the timings of this project's server. llama.cpp has other ones of the same name."""
    try:
        return msgspec.convert(value, Timings)
    except msgspec.ValidationError:
        return UNSET


def _token(token: _Token) -> TokenLogprob:
    others = [TopLogprob(**_top(each)) for each in token.top_logprobs or ()]
    return TokenLogprob(**_top(token), top_logprobs=others)


def _top(token: _Top) -> dict[str, Any]:
    data = list(token.token.encode()) if token.bytes is None else token.bytes
    return {"token": token.token, "bytes": data, "logprob": token.logprob}


def error_of(status: int, body: bytes) -> UpstreamRefusal | UpstreamError:
    """Return an upstream's refusal or failure. body: of its answer."""
    try:
        whole = msgspec.json.decode(body)
        return _error(status, whole.get("error", whole) if isinstance(whole, dict) else whole)
    except (msgspec.DecodeError, RecursionError):
        return _error(status, body[:300].decode(errors="replace"))


def _error(status: int, value: Any) -> UpstreamRefusal | UpstreamError:
    """value: OpenAI's error object, or another value. A status that is not of an error, as of a
    redirect, becomes 502."""
    try:
        told = msgspec.convert(value, _Error)
    except msgspec.ValidationError:
        text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
        told = _Error(message=text[:300] or f"the upstream answers with HTTP status {status}")
    refused = UpstreamRefusal(told.message, param=told.param)
    error = refused if 400 <= status < 500 else UpstreamError(told.message)
    error.status = status if 400 <= status < 600 else 502
    error.code = str(told.code or "upstream_error")
    return error
