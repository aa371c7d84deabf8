"""Ollama's requests. Each becomes a `ChatRequest`, so its options are those of chat completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from minisgl.errors import InvalidRequest
from minisgl.server.api.chat import ChatRequest
from minisgl.server.api.messages import Message, ToolCall, ToolChoice, ToolFunction
from minisgl.server.api.schema import Timeout, TopK
from minisgl.server.api.structured import JsonSchema, ResponseFormat
from minisgl.server.strict import Json, ignored, only
from minisgl_gateway.pictures import Content, content_of, picture_of
from minisgl_gateway.turns import tools_of

Resource = Annotated[Any, ignored("Changes nothing: the server was started with its resources.")]


class OllamaOptions(Json, frozen=True, kw_only=True):
    temperature: float | None = None
    top_p: float | None = None
    top_k: TopK | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: list[str] | str | None = None
    num_predict: Annotated[
        int | None, Meta(description="The most output tokens; negative: what the context leaves.")
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
    index: Annotated[int | msgspec.UnsetType | None, ignored("Changes nothing.")] = msgspec.UNSET


class OllamaCall(Json, frozen=True, kw_only=True):
    function: OllamaFunction
    id: str | None = None
    type: Literal["function"] | None = "function"


class OllamaMessage(Json, frozen=True, kw_only=True):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    images: list[str] | None = None

    def message(self, index: int) -> Message:
        """Return the chat message. index: of this message. Raises InvalidRequest."""
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
            content=_content(self.images, self.content) or (None if calls else ""),
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
    truncate: Annotated[
        bool | None, ignored("Changes nothing: a prompt that does not fit is refused.")
    ] = None
    shift: Annotated[
        bool | None, ignored("Changes nothing: an answer ends when the context is full.")
    ] = None
    keep_alive: Annotated[
        float | str | None, ignored("Changes nothing: the model stays loaded.")
    ] = None

    def _chat(
        self,
        messages: list[Message],
        tools: list[Any] | None = None,
        tool_choice: ToolChoice | None = None,
    ) -> ChatRequest:
        options = self.options or OllamaOptions()
        options.refuse_unsupported("options.")
        num_predict = options.num_predict
        has_logprobs = bool(self.logprobs or self.top_logprobs)
        chat = ChatRequest(
            messages=messages,
            tools=tools_of(tools or ()),
            tool_choice=tool_choice,
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
            min_p=options.min_p,
            seed=options.seed,
            stop=options.stop,
            max_tokens=num_predict if num_predict and num_predict > 0 else None,
            max_tokens_policy="clamp",
            repetition_penalty=options.repeat_penalty,
            presence_penalty=options.presence_penalty,
            frequency_penalty=options.frequency_penalty,
            logprobs=has_logprobs,
            top_logprobs=self.top_logprobs,
            response_format=self._response_format(),
            reasoning_effort=self.think if isinstance(self.think, str) else None,
            enable_thinking=self.think if isinstance(self.think, bool) else None,
            stream=self.stream is not False,
            timeout=self.timeout,
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
    tool_choice: ToolChoice | None = None

    @property
    def chat(self) -> ChatRequest:
        """The same request to chat completions. Raises InvalidRequest."""
        messages = [message.message(i) for i, message in enumerate(self.messages)]
        return self._chat(messages, self.tools, self.tool_choice)


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
    images: list[str] | None = None
    width: Annotated[int | None, only(why="this server writes text only")] = None
    height: Annotated[int | None, only(why="this server writes text only")] = None
    steps: Annotated[int | None, only(why="this server writes text only")] = None

    @property
    def chat(self) -> ChatRequest:
        """The same request to chat completions. Raises InvalidRequest."""
        for name in ("images", "system"):
            if self.raw and getattr(self, name):
                raise InvalidRequest(f"{name} is for chat templates; leave raw out", param=name)
        system = [Message(role="system", content=self.system)] if self.system else []
        content = _content(self.images, self.prompt)
        return self._chat([*system, Message(role="user", content=content)])


def _content(images: Sequence[str] | None, text: str | None) -> Content:
    """Return a message's content. images: base64 of files, which come first, as in Ollama."""
    return content_of([*map(picture_of, images or ()), text or ""])
