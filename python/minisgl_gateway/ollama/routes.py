"""POST /api/chat and /api/generate: Ollama's API. Answers are streams of JSON lines by default."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any, Final, Literal

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import UNSET, UnsetType

from minisgl.core import Finished
from minisgl.core.answer import Part, SplitAnswer, collect
from minisgl.message import ChatPrompt, Prompt, TextPrompt, TextReply
from minisgl.server import body
from minisgl.server.api.error_forms import OllamaError
from minisgl.server.api.left_out import OmissionLog, unused_switch
from minisgl.server.api.logprobs import ChatLogprobs, TokenLogprob
from minisgl.server.api.schema import ErrorBody
from minisgl.server.api.strict import Json
from minisgl.server.api.tools import call_input, new_call_id
from minisgl.server.openapi import operation
from minisgl.server.respond import Output, Shape, respond
from minisgl.server.site import Routes, Site
from minisgl_gateway.ollama.models import is_named
from minisgl_gateway.ollama.request import (
    OllamaCall,
    OllamaChatRequest,
    OllamaFunction,
    OllamaGenerateRequest,
)

NDJSON: Final = "application/x-ndjson"

_OPTIONS: Final = (
    *("temperature", "top_p", "min_p", "seed", "stop"),
    *("presence_penalty", "frequency_penalty"),
)
_NAMES: Final = {
    "response_format.json_schema.schema": "format",
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    **{name: f"options.{name}" for name in _OPTIONS},
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


def router(site: Site) -> APIRouter:
    frontend, model = site.frontend, site.model
    routes = APIRouter()
    omissions = OmissionLog()

    async def answer(
        request: Request, asked: OllamaChatRequest | OllamaGenerateRequest, prompt: Prompt | None
    ) -> Response:
        name = is_named(model, asked.model)
        is_chat = isinstance(asked, OllamaChatRequest)
        shape = _OllamaShape(
            name,
            is_chat=is_chat,
            has_logprobs=bool(asked.logprobs or asked.top_logprobs),
        )
        if prompt is None:  # a request to load the model, which is loaded already
            return body.response(shape.loaded())
        chat = asked.chat
        sampling, names = chat.params(model.defaults, _NAMES)
        args = prompt.template_args if isinstance(prompt, ChatPrompt) else {}
        return await respond(
            request,
            frontend,
            [prompt],
            sampling,
            chat,
            shape=shape,
            names={"prompt": "messages" if is_chat else "prompt", **_NAMES, **names},
            is_clamped=True,
            warning=omissions.warning(unused_switch(args, model.card)),
        )

    documented: dict[str, Any] = {"error": OllamaError, "stream": NDJSON}

    @routes.post(
        "/api/chat", **operation(OllamaChatRequest, OllamaAnswer, OllamaAnswer, **documented)
    )
    async def chat(request: Request) -> Response:
        """Continue a chat; Ollama's schema."""
        asked = await body.read(request, OllamaChatRequest, may_lack_type=True)
        return await answer(request, asked, asked.chat.split_prompt if asked.messages else None)

    @routes.post(
        "/api/generate",
        **operation(OllamaGenerateRequest, OllamaAnswer, OllamaAnswer, **documented),
    )
    async def generate(request: Request) -> Response:
        """Answer a prompt; Ollama's schema."""
        asked = await body.read(request, OllamaGenerateRequest, may_lack_type=True)
        prompt: Prompt = TextPrompt(text=asked.prompt) if asked.raw else asked.chat.split_prompt
        return await answer(request, asked, prompt if asked.prompt else None)

    return routes


class _OllamaShape(Shape):
    """Writes the answer. Mutable: it holds the parts of a tool call until the call is complete."""

    media_type = NDJSON.encode()

    def __init__(self, model: str, *, is_chat: bool, has_logprobs: bool) -> None:
        self._model = model
        self._is_chat = is_chat
        self._has_logprobs = has_logprobs
        self._call: list[Part] = []

    def whole(self, outputs: list[Output]) -> OllamaAnswer:
        (output,) = outputs
        return self._answer(output.answer, output, **_ending(output.end))

    def loaded(self) -> OllamaAnswer:
        """Return the answer to a request without a prompt."""
        return self._answer(SplitAnswer(), done=True, done_reason="load")

    def text(self, index: int, reply: TextReply) -> bytes:
        parts: list[Part] = [*reply.parts] or ([("content", reply.text)] if reply.text else [])
        ready: list[Part] = []
        for part in parts:
            if part[0] != "arguments":
                ready += self._call
                self._call = []
            (self._call if part[0] in ("call", "arguments") else ready).append(part)
        if not ready and not self._has_logprobs:
            return b""
        return _line(self._answer(collect(ready), reply, done=False))

    def end(self, index: int, end: Finished) -> bytes:
        call = _line(self._answer(collect(self._call), done=False)) if self._call else b""
        return call + _line(self._answer(SplitAnswer(), **_ending(end)))

    def closing(self, ends: list[Finished]) -> bytes:
        return b""

    def failure(self, error: ErrorBody) -> bytes:
        return _line(OllamaError(error=error.error.message))

    def _answer(
        self, answer: SplitAnswer, output: Output | TextReply | None = None, **more: Any
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
        if output and self._has_logprobs:
            more["logprobs"] = ChatLogprobs.of(output.tokens, output.logprobs or []).content
        now = datetime.fromtimestamp(time.time(), UTC).isoformat()
        return OllamaAnswer(model=self._model, created_at=now, **more)


def _ending(end: Finished) -> dict[str, Any]:
    return {
        "done": True,
        "done_reason": "length" if end.reason == "length" else "stop",
        "total_duration": round((end.queued_s + end.prefill_s + end.decode_s) * 1e9),
        "load_duration": 0,
        "prompt_eval_count": end.num_prompt_tokens,
        "prompt_eval_duration": round(end.prefill_s * 1e9),
        "eval_count": end.num_output_tokens,
        "eval_duration": round(end.decode_s * 1e9),
    }


def _line(answer: msgspec.Struct) -> bytes:
    return msgspec.json.encode(answer) + b"\n"


ROUTES: Final = Routes(
    router, (OllamaChatRequest, OllamaGenerateRequest, OllamaAnswer, OllamaError)
)
