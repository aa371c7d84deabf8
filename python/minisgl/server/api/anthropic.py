"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages.

A request becomes a `ChatRequest`, so prompts and options are those of chat completions. Several
text blocks of a turn are joined with line breaks, and turns of one role that follow one another are
one turn, as Anthropic's documentation has it. A final turn of the assistant is continued.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import Meta

from minisgl.core import Finished
from minisgl.message import TextReply
from minisgl.server import body
from minisgl.server.api.chat import ChatRequest
from minisgl.server.api.error_forms import ErrorEvent, anthropic_error
from minisgl.server.api.messages import Message, TemplateArgs, ToolCall, ToolFunction
from minisgl.server.api.models import ServedModel
from minisgl.server.api.schema import (
    ErrorBody,
    Json,
    NonNegative,
    Positive,
    Timings,
    ignored,
    only,
)
from minisgl.server.api.structured import JsonSchema, ResponseFormat, in_turn, naming
from minisgl.server.api.tools import call_input, new_call_id, tool_choice_of, tools_of
from minisgl.server.frontend import Frontend
from minisgl.server.openapi import operation
from minisgl.server.respond import Output, Shape, named_event, respond
from minisgl.tokenizer.parse.answer import Kind, Part

_NO_CACHE_MARKS: Final = "Changes nothing: equal prefixes are found without marks."
_KEEP_THINKING: Final = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}

_NAMES: Final = {"response_format.json_schema": "output_config.format", "stop": "stop_sequences"}
"""Fields by their names in chat completions."""

CacheControl = Annotated[dict[str, Any] | None, ignored(_NO_CACHE_MARKS)]


class TextBlock(Json, tag_field="type", tag="text", frozen=True, kw_only=True):
    text: str
    cache_control: CacheControl = None
    citations: Annotated[list[Any] | None, only([], why="put their text into text")] = None


class ThinkingBlock(Json, tag_field="type", tag="thinking", frozen=True, kw_only=True):
    thinking: str
    signature: Annotated[str, ignored("Changes nothing.")] = ""


class ToolUseBlock(Json, tag_field="type", tag="tool_use", frozen=True, kw_only=True):
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl = None
    caller: Annotated[dict[str, Any] | None, ignored("Changes nothing.")] = None


class ToolResultBlock(Json, tag_field="type", tag="tool_result", frozen=True, kw_only=True):
    tool_use_id: str
    content: str | list[TextBlock] = ""
    is_error: Annotated[
        bool | None, Meta(description="The model sees the content behind the word Error.")
    ] = None
    cache_control: CacheControl = None


class Turn(Json, frozen=True, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock]

    def messages(self, path: str) -> list[Message]:
        """Of a chat. Raises InvalidRequest. Tool results become messages of their own."""
        if isinstance(self.content, str):
            return [Message(role=self.role, content=self.content)]
        results, texts, thoughts, calls = [], [], [], []
        for i, block in enumerate(self.content):
            block.refuse_unsupported(f"{path}.content[{i}].")
            if isinstance(block, TextBlock):
                texts.append(block.text)
            elif isinstance(block, ThinkingBlock):
                thoughts.append(block.thinking)
            elif isinstance(block, ToolUseBlock):
                arguments = msgspec.json.encode(block.input).decode()
                function = ToolFunction(name=block.name, arguments=arguments)
                calls.append(ToolCall(id=block.id, function=function))
            else:
                text = f"Error: {_joined(block.content)}" if block.is_error else block.content
                results.append(
                    Message(role="tool", content=_joined(text), tool_call_id=block.tool_use_id)
                )
        if results and not (texts or calls or thoughts):
            return results
        spoken = Message(
            role=self.role,
            content="\n".join(texts) or (None if calls else ""),
            reasoning_content="\n".join(thoughts) or None,
            tool_calls=calls or None,
        )
        return [*results, spoken]


def _joined(content: str | list[TextBlock] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(block.text for block in content)


class AnthropicTool(Json, frozen=True, kw_only=True):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    cache_control: CacheControl = None
    strict: Annotated[bool | None, ignored("Changes nothing: see tool_choice.")] = None
    eager_input_streaming: Annotated[bool | None, ignored("Input is streamed as it comes.")] = None
    defer_loading: Annotated[bool | None, only(False, why="send the tools that it may use")] = None
    allowed_callers: Annotated[list[str] | None, only(["direct"], why="no code is run here")] = None
    input_examples: Annotated[
        list[Any] | None, only([], why="put examples into the description")
    ] = None

    def for_chat(self, path: str) -> dict[str, Any]:
        """The tool in the form of chat completions. Raises InvalidRequest."""
        self.refuse_unsupported(f"{path}.")
        function = {"name": self.name, "parameters": self.input_schema}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": function}


class AnthropicChoice(Json, frozen=True, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @property
    def for_chat(self) -> str | dict[str, Any]:
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name or ""}}
        return "required" if self.type == "any" else self.type


class Thinking(Json, frozen=True, kw_only=True):
    """adaptive: as the template decides. budget_tokens: of thinking at most, with enabled."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: NonNegative | None = None
    display: Annotated[str | None, only("summarized", why="thinking is shown whole")] = None


class OutputFormat(Json, frozen=True, kw_only=True):
    schema: dict[str, Any]
    type: Literal["json_schema"] = "json_schema"


class OutputConfig(Json, frozen=True, kw_only=True):
    format: Annotated[
        OutputFormat | None, Meta(description="A JSON schema that the answer's text follows.")
    ] = None
    effort: Annotated[str | None, Meta(description="reasoning_effort of chat completions.")] = None


class CountRequest(Json, frozen=True, kw_only=True):
    """POST /v1/messages/count_tokens"""

    model: str | None = None
    messages: Annotated[list[Turn], Meta(min_length=1)]
    system: str | list[TextBlock] | None = None
    cache_control: CacheControl = None
    thinking: Thinking | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicChoice | None = None
    output_config: OutputConfig | None = None
    context_management: Annotated[
        dict[str, Any] | None,
        only({}, {"edits": []}, _KEEP_THINKING, why="the client edits its messages itself"),
    ] = None
    mcp_servers: Annotated[list[Any] | None, only([], why="call tools in the client")] = None
    compaction: Annotated[dict[str, Any] | None, only(why="ask for a summary in a message")] = None
    speed: Annotated[str | None, only("standard", why="there is one speed")] = None
    billing_policy: Annotated[Any, ignored("Changes nothing: nothing is billed.")] = None

    chat_template_kwargs: TemplateArgs = None

    @property
    def chat(self) -> ChatRequest:
        """The same request to chat completions. Raises InvalidRequest."""
        system = [Message(role="system", content=_joined(self.system))] if self.system else []
        given = [
            message
            for index, turn in enumerate(self.messages)
            for message in turn.messages(f"messages[{index}]")
        ]
        messages = _merged([*system, *given])
        last = messages[-1]
        if len(messages) > 1 and last == Message(role="assistant", content=""):
            last = messages.pop()
        is_begun = last.role == "assistant" and bool(last.content) and not last.tool_calls
        thinking = self.thinking or Thinking(type="adaptive")
        thinking.refuse_unsupported("thinking.")
        choice = self.tool_choice or AnthropicChoice(type="auto")
        tools = [tool.for_chat(f"tools[{i}]") for i, tool in enumerate(self.tools or ())]
        output = self.output_config or OutputConfig()
        schema = JsonSchema(schema=output.format.schema) if output.format else None
        chat = ChatRequest(
            messages=messages,
            reasoning_effort=output.effort,
            response_format=(
                ResponseFormat(type="json_schema", json_schema=schema) if schema else None
            ),
            tools=tools_of(tools),
            tool_choice=tool_choice_of(choice.for_chat) if tools else None,
            parallel_tool_calls=not choice.disable_parallel_tool_use,
            enable_thinking=None if thinking.type == "adaptive" else thinking.type == "enabled",
            thinking_budget=thinking.budget_tokens if thinking.type == "enabled" else None,
            chat_template_kwargs=self.chat_template_kwargs,
            continue_final_message=is_begun or None,
        )
        chat.refuse_unsupported()
        return chat


def _merged(messages: list[Message]) -> list[Message]:
    """Messages of one role that follow one another become one; tool results stay apart."""
    merged: list[Message] = []
    for message in messages:
        if not merged or merged[-1].role != message.role or message.role == "tool":
            merged.append(message)
            continue
        last = merged[-1]
        merged[-1] = msgspec.structs.replace(
            last,
            content=_lines(last.content, message.content),
            reasoning_content=_lines(last.reasoning_content, message.reasoning_content),
            tool_calls=[*(last.tool_calls or ()), *(message.tool_calls or ())] or None,
        )
    return merged


def _lines(first: Any, second: Any) -> Any:
    return f"{first}\n{second}" if first and second else first or second


class MessagesRequest(CountRequest, frozen=True, kw_only=True):
    """POST /v1/messages"""

    max_tokens: Positive
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: NonNegative | None = None
    metadata: Annotated[dict[str, Any] | None, ignored("Changes nothing.")] = None
    service_tier: Annotated[str | None, only("auto", "standard_only", why="there is one tier")] = (
        None
    )
    container: Annotated[Any, only(why="no code is run here")] = None
    diagnostics: Annotated[dict[str, Any] | None, only(why="timings says what was cached")] = None
    inference_geo: Annotated[str | None, only("global", why="the server is where it is")] = None
    fallbacks: Annotated[Any, only([], "default", why="one model is served")] = None
    fallback_credit_token: Annotated[Any, only(why="nothing is billed")] = None
    thread: Annotated[dict[str, Any] | None, only(why="send the whole conversation")] = None

    @property
    def chat(self) -> ChatRequest:
        return msgspec.structs.replace(
            super().chat,
            max_tokens=self.max_tokens,
            stop=self.stop_sequences,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
        )


class TokenCount(Json, frozen=True, kw_only=True):
    input_tokens: int


class MessageUsage(Json, frozen=True, kw_only=True):
    """input_tokens are those that were computed; the prompt has those of the cache as well."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0

    @classmethod
    def of(cls, end: Finished) -> MessageUsage:
        return cls(
            input_tokens=end.num_prompt_tokens - end.num_cached_tokens,
            output_tokens=end.num_output_tokens,
            cache_read_input_tokens=end.num_cached_tokens,
        )


StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


class Ending(Json, frozen=True, kw_only=True):
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None

    @classmethod
    def of(cls, end: Finished, max_tokens: int, *, has_calls: bool) -> Ending:
        if isinstance(end.stop_match, str):
            return cls(stop_reason="stop_sequence", stop_sequence=end.stop_match)
        if end.reason != "length":
            return cls(stop_reason="tool_use" if has_calls else "end_turn")
        is_full = end.num_output_tokens < max_tokens
        return cls(stop_reason="model_context_window_exceeded" if is_full else "max_tokens")


class AnswerText(Json, tag_field="type", tag="text", frozen=True, kw_only=True):
    text: str


class AnswerThinking(Json, tag_field="type", tag="thinking", frozen=True, kw_only=True):
    thinking: str
    signature: str = ""


class AnswerToolUse(Json, tag_field="type", tag="tool_use", frozen=True, kw_only=True):
    """input: the arguments. If the model wrote no JSON object, `arguments` in it has the text."""

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
    timings: Timings


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
"""Of a stream."""

RECORDS: Final = (MessagesRequest, CountRequest, AnthropicMessage, TokenCount, *EVENTS)
"""The roots of this family's schema in /openapi.json."""


def router(frontend: Frontend, model: ServedModel) -> APIRouter:
    routes = APIRouter()

    @routes.post(
        "/v1/messages",
        **operation(MessagesRequest, AnthropicMessage, *EVENTS, error=ErrorEvent),
    )
    async def messages(request: Request) -> Response:
        """Continue a chat; Anthropic's schema with a few extensions."""
        asked = await body.read(request, MessagesRequest)
        name = model.check(asked.model)
        chat = asked.chat
        with naming(_NAMES):
            sampling, names = chat.with_form(chat.sampling(model.defaults))
        return await respond(
            request,
            frontend,
            [chat.split_prompt],
            sampling,
            priority=None,
            cache_salt=None,
            stream=asked.stream,
            shape=_MessageShape(name, asked),
            names={"prompt": "messages", **in_turn(names, _NAMES)},
            is_clamped=True,
        )

    @routes.post(
        "/v1/messages/count_tokens", **operation(CountRequest, TokenCount, error=ErrorEvent)
    )
    async def count_tokens(request: Request) -> Response:
        """The tokens of the prompt that /v1/messages makes of the same request."""
        asked = await body.read(request, CountRequest)
        model.check(asked.model)
        reply = await frontend.round_trips.encode(asked.chat.split_prompt)
        count = TokenCount(input_tokens=len(reply.ids) // 4)
        return Response(msgspec.json.encode(count), media_type="application/json")

    return routes


class _MessageShape(Shape):
    """Mutable: the blocks that have begun, and the kind of the one that is open."""

    def __init__(self, model: str, asked: MessagesRequest) -> None:
        self._id = f"msg_{uuid.uuid4().hex}"
        self._model = model
        self._max_tokens = asked.max_tokens
        self._open: Kind | None = None
        self._num_blocks = 0
        self._has_calls = False

    def whole(self, outputs: list[Output]) -> AnthropicMessage:
        (output,) = outputs
        answer = output.answer
        blocks: list[AnswerBlock] = []
        if answer.reasoning:
            blocks.append(AnswerThinking(thinking=answer.reasoning))
        if answer.content:
            blocks.append(AnswerText(text=answer.content))
        blocks += [
            AnswerToolUse(id=_tool_id(), name=call.name, input=call_input(call.arguments))
            for call in answer.calls
        ]
        ending = Ending.of(output.end, self._max_tokens, has_calls=bool(answer.calls))
        return AnthropicMessage(
            id=self._id,
            model=self._model,
            content=blocks,
            usage=MessageUsage.of(output.end),
            stop_reason=ending.stop_reason,
            stop_sequence=ending.stop_sequence,
            timings=Timings.of([output.end]),
        )

    def opening(self, num_prompt_tokens: int) -> bytes:
        message = AnthropicMessage(
            id=self._id,
            model=self._model,
            content=[],
            usage=MessageUsage(input_tokens=num_prompt_tokens, output_tokens=0),
        )
        return _framed(MessageStart(message=message))

    def text(self, index: int, reply: TextReply) -> bytes:
        parts: list[Part] = [*reply.parts]
        if not parts and reply.text:
            parts = [("content", reply.text)]
        return b"".join(event for part in parts for event in self._part(*part))

    def _part(self, kind: Kind, text: str) -> Iterator[bytes]:
        if kind == "call" or kind not in (
            "arguments",
            self._open,
        ):  # arguments are of the open call
            yield from self._begin(kind, text)
        delta: TextDelta | ThinkingDelta | InputDelta
        if kind == "call":
            return
        if kind == "content":
            delta = TextDelta(text=text)
        elif kind == "reasoning":
            delta = ThinkingDelta(thinking=text)
        else:
            delta = InputDelta(partial_json=text)
        yield _framed(BlockDelta(index=self._num_blocks - 1, delta=delta))

    def _begin(self, kind: Kind, text: str) -> Iterator[bytes]:
        """End the open block and begin one. text: the name of the tool that is called."""
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

    def end(self, index: int, end: Finished) -> bytes:
        delta = MessageDelta(
            delta=Ending.of(end, self._max_tokens, has_calls=self._has_calls),
            usage=MessageUsage.of(end),
            timings=Timings.of([end]),
        )
        return b"".join(self._end_block()) + _framed(delta)

    def closing(self, ends: list[Finished]) -> bytes:
        return _framed(MessageStop())

    def failure(self, error: ErrorBody) -> bytes:
        return _framed(anthropic_error(error))


def _framed(body: msgspec.Struct) -> bytes:
    return named_event(str(body.__struct_config__.tag), body)


def _tool_id() -> str:
    return f"toolu_{new_call_id()}"
