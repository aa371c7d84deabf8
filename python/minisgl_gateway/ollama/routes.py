"""POST /api/chat and /api/generate: Ollama's API. Answers are streams of JSON lines by default."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final, Literal

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import UNSET, UnsetType

from minisgl.core.answer import Part, SplitAnswer, collect
from minisgl.server.api.answers import TokenLogprob
from minisgl.server.api.left_out import Omission, unused_switch
from minisgl.server.api.messages import new_call_id
from minisgl.server.site import operation
from minisgl.server.strict import Json
from minisgl.server.web import body
from minisgl.server.web.errors import ErrorBody
from minisgl_gateway.chat import Asked, Chat, End, Form
from minisgl_gateway.error_forms import OllamaError
from minisgl_gateway.in_process import in_process
from minisgl_gateway.ollama.models import named
from minisgl_gateway.ollama.request import (
    OllamaCall,
    OllamaChatRequest,
    OllamaFunction,
    OllamaGenerateRequest,
    OllamaOptions,
)
from minisgl_gateway.pictures import readable
from minisgl_gateway.turns import call_input

NDJSON: Final = "application/x-ndjson"

_NAMES: Final = {
    "response_format.json_schema.schema": "format",
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "reasoning_effort": "think",
    **{name: f"options.{name}" for name in OllamaOptions.__struct_fields__},
}
"""The request's names of fields, by their names in chat completions."""


class OllamaAnswer(Json, frozen=True, kw_only=True, omit_defaults=True):
    """An answer, or a line of a stream. The last line has done=true. Durations are nanoseconds.

    message: of /api/chat. response, thinking: of /api/generate.
    """

    model: str
    created_at: str
    done: bool | UnsetType = UNSET
    message: AnswerTurn | UnsetType = UNSET
    response: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET
    done_reason: Literal["stop", "length", "load"] | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class AnswerTurn(Json, frozen=True, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaCall] | UnsetType = UNSET


def router(server: Chat) -> APIRouter:
    routes = APIRouter()

    async def answer(
        request: Request, asked: OllamaChatRequest | OllamaGenerateRequest, *, is_load: bool
    ) -> Response:
        model = await named(server, request, asked.model)
        wanted, _ = readable(asked.chat, [], model.abilities.reads_images)
        is_chat = isinstance(asked, OllamaChatRequest)
        form = _OllamaForm(asked.model, is_chat=is_chat, has_logprobs=bool(wanted.logprobs))
        if is_load:  # the model is loaded already
            return body.response(form.loaded())
        text = None if isinstance(asked, OllamaChatRequest) or not asked.raw else asked.prompt
        switch = {"enable_thinking": None if text is not None else wanted.enable_thinking}
        whole = Asked(
            chat=msgspec.structs.replace(wanted, model=model.name),
            text=text,
            names={"prompt": "messages" if is_chat else "prompt", **_NAMES},
            left_out=[Omission("think", "think") for _ in unused_switch(switch, model.abilities)],
        )
        return await server.answer(request, whole, form)

    documented: dict[str, Any] = {"error": OllamaError, "stream": NDJSON}

    @routes.post(
        "/api/chat", **operation(OllamaChatRequest, OllamaAnswer, OllamaAnswer, **documented)
    )
    async def chat(request: Request) -> Response:
        """Continue a chat; Ollama's schema."""
        asked = await body.read(request, OllamaChatRequest, may_lack_type=True)
        return await answer(request, asked, is_load=not asked.messages)

    @routes.post(
        "/api/generate",
        **operation(OllamaGenerateRequest, OllamaAnswer, OllamaAnswer, **documented),
    )
    async def generate(request: Request) -> Response:
        """Answer a prompt; Ollama's schema."""
        asked = await body.read(request, OllamaGenerateRequest, may_lack_type=True)
        return await answer(request, asked, is_load=not asked.prompt)

    return routes


class _OllamaForm(Form):
    """Writes the answer. Mutable: it holds the parts of a tool call until the call is complete."""

    media_type = NDJSON.encode()

    def __init__(self, model: str, *, is_chat: bool, has_logprobs: bool) -> None:
        self._model = model
        self._is_chat = is_chat
        self._has_logprobs = has_logprobs
        self._call: list[Part] = []

    def whole(self, parts: Sequence[Part], logprobs: list[TokenLogprob], end: End) -> OllamaAnswer:
        return self._answer(collect(parts), logprobs, **_ending(end))

    def loaded(self) -> OllamaAnswer:
        """Return the answer to a request without a prompt."""
        return self._answer(SplitAnswer(), done=True, done_reason="load")

    def text(self, parts: Sequence[Part], logprobs: list[TokenLogprob]) -> bytes:
        ready: list[Part] = []
        for part in parts:
            if part[0] != "arguments":
                ready += self._call
                self._call = []
            (self._call if part[0] in ("call", "arguments") else ready).append(part)
        if not ready and not self._has_logprobs:
            return b""
        return _line(self._answer(collect(ready), logprobs, done=False))

    def end(self, end: End) -> bytes:
        call = _line(self._answer(collect(self._call), done=False)) if self._call else b""
        return call + _line(self._answer(SplitAnswer(), **_ending(end)))

    def failure(self, error: ErrorBody) -> bytes:
        return _line(OllamaError(error=error.error.message))

    def _answer(
        self, answer: SplitAnswer, logprobs: list[TokenLogprob] | None = None, **more: Any
    ) -> OllamaAnswer:
        thinking = answer.reasoning or UNSET
        if self._is_chat:
            calls = [
                OllamaCall(
                    id=new_call_id(),
                    function=OllamaFunction(name=call.name, arguments=call_input(call.arguments)),
                )
                for call in answer.calls
            ]
            more["message"] = AnswerTurn(
                content=answer.content, thinking=thinking, tool_calls=calls or UNSET
            )
        else:
            more["response"], more["thinking"] = answer.content, thinking
        if logprobs is not None and self._has_logprobs:
            more["logprobs"] = logprobs
        now = datetime.fromtimestamp(time.time(), UTC).isoformat()
        return OllamaAnswer(model=self._model, created_at=now, **more)


def _ending(end: End) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "done": True,
        "done_reason": "length" if end.is_cut else "stop",
        "load_duration": 0,
        "prompt_eval_count": end.usage.prompt_tokens,
        "eval_count": end.usage.completion_tokens,
    }
    if times := end.timings:
        whole_s = times.queued_s + times.prefill_s + times.decode_s
        fields["total_duration"] = round(whole_s * 1e9)
        fields["prompt_eval_duration"] = round(times.prefill_s * 1e9)
        fields["eval_duration"] = round(times.decode_s * 1e9)
    return fields


def _line(answer: msgspec.Struct) -> bytes:
    return msgspec.json.encode(answer) + b"\n"


ROUTES: Final = in_process(
    router, (OllamaChatRequest, OllamaGenerateRequest, OllamaAnswer, OllamaError)
)
