"""POST /api/chat and /api/generate: Ollama's API. Streams are lines of JSON, and are the default.

A request becomes a `ChatRequest`, so prompts and options are those of chat completions.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import UNSET, Meta, UnsetType

from minisgl.core import Finished
from minisgl.message import Prompt, TextPrompt, TextReply
from minisgl.server import body
from minisgl.server.api.chat import ChatRequest
from minisgl.server.api.error_forms import OllamaError
from minisgl.server.api.logprobs import ChatLogprobs, TokenLogprob
from minisgl.server.api.messages import Message, ToolCall, ToolFunction
from minisgl.server.api.models import ServedModel
from minisgl.server.api.ollama_models import is_named
from minisgl.server.api.schema import ErrorBody, NonNegative, Timeout
from minisgl.server.api.strict import Json, ignored, only
from minisgl.server.api.structured import JsonSchema, ResponseFormat
from minisgl.server.api.tools import call_input, new_call_id, tools_of
from minisgl.server.frontend import Frontend
from minisgl.server.openapi import operation
from minisgl.server.respond import Output, Shape, respond
from minisgl.tokenizer.parse.answer import Part, SplitAnswer, collect

NDJSON: Final = "application/x-ndjson"

Resource = Annotated[Any, ignored("Changes nothing: the server was started with its resources.")]


class OllamaOptions(Json, frozen=True, kw_only=True):
    temperature: float | None = None
    top_p: float | None = None
    top_k: NonNegative | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: list[str] | str | None = None
    num_predict: Annotated[
        int | None, Meta(description="Output tokens at most; negative: what the context leaves.")
    ] = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_last_n: Annotated[
        int | None, ignored("Changes nothing: penalties count all tokens.")
    ] = None
    mirostat: Annotated[int | None, only(0, why="sample with temperature and top_p")] = None
    mirostat_tau: Annotated[float | None, ignored("Changes nothing without mirostat.")] = None
    mirostat_eta: Annotated[float | None, ignored("Changes nothing without mirostat.")] = None
    tfs_z: Annotated[float | None, only(1, why="use min_p")] = None
    typical_p: Annotated[float | None, only(1, why="use min_p")] = None
    penalize_newline: Annotated[bool | None, only(True, why="use logit_bias of /v1")] = None
    num_ctx: Resource = None
    num_keep: Resource = None
    num_batch: Resource = None
    num_gpu: Resource = None
    main_gpu: Resource = None
    num_thread: Resource = None
    numa: Resource = None
    low_vram: Resource = None
    f16_kv: Resource = None
    logits_all: Resource = None
    vocab_only: Resource = None
    use_mmap: Resource = None
    use_mlock: Resource = None
    embedding_only: Resource = None


class OllamaFunction(Json, frozen=True, kw_only=True):
    name: str
    arguments: dict[str, Any] = msgspec.field(default_factory=dict)
    index: Annotated[int | None, ignored("Changes nothing.")] = None


class OllamaCall(Json, frozen=True, kw_only=True):
    function: OllamaFunction
    id: str | None = None
    type: Literal["function"] | None = None


class OllamaMessage(Json, frozen=True, kw_only=True):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    images: Annotated[list[Any] | None, only([], why="this server reads text only")] = None

    def message(self, index: int) -> Message:
        """Of a chat. Raises InvalidRequest."""
        self.refuse_unsupported(f"messages[{index}].")
        calls = [
            ToolCall(
                id=call.id or f"call_{index}_{number}",
                function=ToolFunction(
                    name=call.function.name,
                    arguments=msgspec.json.encode(call.function.arguments).decode(),
                ),
            )
            for number, call in enumerate(self.tool_calls or ())
        ]
        return Message(
            role=self.role,
            content=self.content or (None if calls else ""),
            name=self.tool_name,
            tool_call_id=self.tool_call_id,
            tool_calls=calls or None,
            reasoning_content=self.thinking,
        )


class _OllamaRequest(Json, frozen=True, kw_only=True):
    model: str
    stream: Annotated[bool | None, Meta(description="Left out: true.")] = None
    options: OllamaOptions | None = None
    format: Annotated[
        Literal["", "json"] | dict[str, Any] | None,
        Meta(description="json, or a JSON schema that the answer follows."),
    ] = None
    think: Annotated[
        bool | str | None, Meta(description="enable_thinking of the template, or an effort.")
    ] = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    timeout: Timeout = None
    keep_alive: Annotated[
        float | str | None, ignored("Changes nothing: the model stays loaded.")
    ] = None

    def _chat(self, messages: list[Message], tools: list[Any] | None = None) -> ChatRequest:
        options = self.options or OllamaOptions()
        options.refuse_unsupported("options.")
        num_predict = options.num_predict
        has_logprobs = bool(self.logprobs or self.top_logprobs)
        chat = ChatRequest(
            messages=messages,
            tools=tools_of(tools or ()),
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
            min_p=options.min_p,
            seed=options.seed,
            stop=options.stop,
            max_tokens=num_predict if num_predict and num_predict > 0 else None,
            repetition_penalty=options.repeat_penalty,
            presence_penalty=options.presence_penalty,
            frequency_penalty=options.frequency_penalty,
            logprobs=has_logprobs,
            top_logprobs=self.top_logprobs,
            response_format=self._response_format(),
            reasoning_effort=self.think if isinstance(self.think, str) else None,
            enable_thinking=self.think if isinstance(self.think, bool) else None,
        )
        chat.refuse_unsupported()
        return chat

    def _response_format(self) -> ResponseFormat | None:
        if isinstance(self.format, dict):
            return ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=self.format))
        return ResponseFormat(type="json_object") if self.format == "json" else None


class OllamaChatRequest(_OllamaRequest, frozen=True, kw_only=True):
    """POST /api/chat"""

    messages: list[OllamaMessage] = msgspec.field(default_factory=list)
    tools: list[Any] | None = None

    @property
    def chat(self) -> ChatRequest:
        """The same request to chat completions. Raises InvalidRequest."""
        messages = [message.message(i) for i, message in enumerate(self.messages)]
        return self._chat(messages, self.tools)


class OllamaGenerateRequest(_OllamaRequest, frozen=True, kw_only=True):
    """POST /api/generate"""

    prompt: str = ""
    system: str | None = None
    raw: Annotated[bool | None, Meta(description="The prompt without the chat template.")] = None
    suffix: Annotated[
        str | None, only("", why="write the model's own fill-in-the-middle tokens into the prompt")
    ] = None
    template: Annotated[str | None, only("", why="render the prompt yourself and set raw")] = None
    context: Annotated[list[int] | None, only([], why="use /api/chat with all messages")] = None
    images: Annotated[list[Any] | None, only([], why="this server reads text only")] = None
    width: Annotated[int | None, only(why="this server writes text only")] = None
    height: Annotated[int | None, only(why="this server writes text only")] = None
    steps: Annotated[int | None, only(why="this server writes text only")] = None

    @property
    def chat(self) -> ChatRequest:
        """The same request to chat completions. Raises InvalidRequest."""
        system = [Message(role="system", content=self.system)] if self.system else []
        return self._chat([*system, Message(role="user", content=self.prompt)])


class OllamaAnswer(Json, frozen=True, kw_only=True, omit_defaults=True):
    """An answer, or an event of a stream; the last one is done. Durations are nanoseconds.

    message: of a chat. response, thinking: of /api/generate.
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


RECORDS: Final = (OllamaChatRequest, OllamaGenerateRequest, OllamaAnswer, OllamaError)
"""The roots of this family's schema in /openapi.json."""


def router(frontend: Frontend, model: ServedModel) -> APIRouter:
    routes = APIRouter()

    async def answer(
        request: Request, asked: OllamaChatRequest | OllamaGenerateRequest, prompt: Prompt | None
    ) -> Response:
        name = is_named(model, asked.model)
        shape = _OllamaShape(
            name,
            is_chat=isinstance(asked, OllamaChatRequest),
            has_logprobs=bool(asked.logprobs or asked.top_logprobs),
        )
        if prompt is None:  # a wish to load the model, which is there
            return Response(msgspec.json.encode(shape.loaded()), media_type="application/json")
        chat = asked.chat
        sampling, names = chat.with_form(chat.sampling(model.defaults))
        return await respond(
            request,
            frontend,
            [prompt],
            sampling,
            priority=None,
            cache_salt=None,
            timeout_s=asked.timeout,
            stream=asked.stream is not False,
            shape=shape,
            names={"prompt": "prompt", "max_tokens": "options.num_predict", **names},
            is_clamped=True,
        )

    documented: dict[str, Any] = {"error": OllamaError, "stream": NDJSON}

    @routes.post(
        "/api/chat", **operation(OllamaChatRequest, OllamaAnswer, OllamaAnswer, **documented)
    )
    async def chat(request: Request) -> Response:
        """Continue a chat; Ollama's schema."""
        asked = await body.read(request, OllamaChatRequest, any_type=True)
        return await answer(request, asked, asked.chat.split_prompt if asked.messages else None)

    @routes.post(
        "/api/generate",
        **operation(OllamaGenerateRequest, OllamaAnswer, OllamaAnswer, **documented),
    )
    async def generate(request: Request) -> Response:
        """Answer a prompt; Ollama's schema."""
        asked = await body.read(request, OllamaGenerateRequest, any_type=True)
        prompt: Prompt = TextPrompt(text=asked.prompt) if asked.raw else asked.chat.split_prompt
        return await answer(request, asked, prompt if asked.prompt else None)

    return routes


class _OllamaShape(Shape):
    """Mutable: the parts of a tool call that is not complete; calls are sent whole."""

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
        """The answer to a request without a prompt."""
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
