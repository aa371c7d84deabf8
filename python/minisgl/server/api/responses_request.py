"""The request of POST /v1/responses, and the chat that it makes."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from msgspec import Meta

from minisgl.errors import InvalidRequest
from minisgl.server.api.chat import ChatRequest
from minisgl.server.api.messages import Message, TemplateArgs, ToolCall, ToolFunction
from minisgl.server.api.response_tools import OfferedTools, offered_tools
from minisgl.server.api.schema import Json, Positive, StreamOptions, Timeout, ignored, only
from minisgl.server.api.structured import JsonSchema, ResponseFormat
from minisgl.server.api.tools import tool_choice_of

LOGPROBS: Final = "message.output_text.logprobs"
Includable = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]


class InputPart(Json, frozen=True, kw_only=True):
    type: Literal["input_text", "output_text", "reasoning_text", "summary_text", "text"]
    text: str
    annotations: Annotated[list[Any] | None, ignored("Changes nothing.")] = None
    logprobs: Annotated[list[Any] | None, ignored("Changes nothing.")] = None
    prompt_cache_breakpoint: Annotated[dict[str, Any] | None, ignored("Changes nothing.")] = None
    parsed: Annotated[Any, ignored("Changes nothing.")] = None


class InputItem(Json, frozen=True, kw_only=True):
    """A message, a function call, its output, or reasoning; items of an answer as they came."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None
    id: Annotated[str | None, ignored("Changes nothing.")] = None
    status: Annotated[str | None, ignored("Changes nothing.")] = None
    phase: Annotated[str | None, ignored("Changes nothing.")] = None
    caller: Annotated[dict[str, Any] | None, ignored("Changes nothing.")] = None
    encrypted_content: Annotated[
        str | None, only("", why="reasoning is sent back as its content")
    ] = None
    namespace: str | None = None
    # OpenAI's clients add these to the items of an answer.
    parsed_arguments: Annotated[Any, ignored("Changes nothing.")] = None
    async_: Annotated[bool | None, only(False, why="send the output with the call")] = None

    def message(self, path: str) -> Message:
        """Of a chat. Raises InvalidRequest."""
        self.refuse_unsupported(f"{path}.")
        match self.type:
            case "function_call":
                name = _given(self.name, f"{path}.name")
                function = ToolFunction(
                    name=f"{self.namespace}.{name}" if self.namespace else name,
                    arguments=_given(self.arguments, f"{path}.arguments"),
                )
                call = ToolCall(id=_given(self.call_id, f"{path}.call_id"), function=function)
                return Message(role="assistant", tool_calls=[call])
            case "function_call_output":
                call_id = _given(self.call_id, f"{path}.call_id")
                output = _given(self.output, f"{path}.output")
                return Message(role="tool", tool_call_id=call_id, content=_text(output))
            case "reasoning":
                thoughts = _text(self.content or self.summary or "")
                return Message(role="assistant", content="", reasoning_content=thoughts)
        content = _text(_given(self.content, f"{path}.content"))
        return Message(role=_given(self.role, f"{path}.role"), content=content)


def _given(value: Any, path: str) -> Any:
    if value is None:
        raise InvalidRequest(f"the field {path} is missing", param=path)
    return value


def _text(content: str | list[InputPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class TextFormat(JsonSchema, frozen=True, kw_only=True):
    """As `ResponseFormat`, with the schema and its name one level higher."""

    type: Literal["text", "json_object", "json_schema"]

    @property
    def response_format(self) -> ResponseFormat:
        given = {name: getattr(self, name) for name in JsonSchema.__struct_fields__}
        return ResponseFormat(type=self.type, json_schema=JsonSchema(**given))


FORMAT_NAMES: Final = {
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
}
"""The request's names of what a refusal can name, by those of chat completions."""


class TextOptions(Json, frozen=True, kw_only=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(Json, frozen=True, kw_only=True):
    effort: str | None = None
    summary: Annotated[str | None, ignored("Changes nothing: reasoning is shown whole.")] = None
    generate_summary: Annotated[str | None, ignored("Changes nothing.")] = None


class ResponsesRequest(Json, frozen=True, kw_only=True):
    """POST /v1/responses"""

    model: str | None = None
    input: str | list[InputItem]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: Annotated[
        bool | None, Meta(description="Keep the answer for previous_response_id; left out: true.")
    ] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_output_tokens: Positive | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[Includable] | None = None
    metadata: dict[str, Any] | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    truncation: Annotated[str | None, only("disabled", why="shorten the input in the client")] = (
        None
    )
    background: Annotated[bool | None, only(False, why="wait for the answer or stream it")] = None
    background_options: Annotated[dict[str, Any] | None, only(why="there is none")] = None
    conversation: Annotated[Any, only(why="use previous_response_id")] = None
    context_management: Annotated[
        list[Any] | None, only([], why="shorten the input in the client")
    ] = None
    max_tool_calls: Annotated[int | None, only(why="the client calls the tools")] = None
    prompt: Annotated[dict[str, Any] | None, only(why="send the prompt's text")] = None
    moderation: Annotated[
        dict[str, Any] | None, only(why="moderate texts with a request of its own")
    ] = None
    access_programs: Annotated[dict[str, Any] | None, only(why="there are none")] = None
    image: Annotated[dict[str, Any] | None, only(why="this server writes text only")] = None
    service_tier: Annotated[str | None, only("auto", "default", why="there is one tier")] = None
    prompt_cache_options: Annotated[
        dict[str, Any] | None, only({"mode": "implicit"}, why="prefixes are cached without it")
    ] = None
    prompt_cache_retention: Annotated[
        str | None, only("in_memory", why="prefixes are kept while the KV pool has room")
    ] = None
    prompt_cache_key: Annotated[
        str | None, ignored("Changes nothing: equal prefixes are found without a key.")
    ] = None
    safety_identifier: Annotated[str | None, ignored("Changes nothing.")] = None
    user: Annotated[str | None, ignored("Changes nothing.")] = None
    client_metadata: Annotated[
        dict[str, Any] | None, ignored("Changes nothing: Codex names its turns in it.")
    ] = None

    chat_template_kwargs: TemplateArgs = None
    timeout: Timeout = None

    @property
    def messages(self) -> list[Message]:
        """Of `input`. Raises InvalidRequest."""
        if isinstance(self.input, str):
            return [Message(role="user", content=self.input)]
        items = [item.message(f"input[{i}]") for i, item in enumerate(self.input)]
        if not items:
            raise InvalidRequest("input must have at least one item", param="input")
        return items

    @property
    def offered(self) -> OfferedTools:
        """Of `tools`. Raises InvalidRequest."""
        return offered_tools(self.tools or ())

    @property
    def has_logprobs(self) -> bool:
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())

    def chat(self, earlier: list[Message]) -> ChatRequest:
        """The same request to chat completions, behind the messages of earlier turns.

        Raises InvalidRequest.
        """
        if self.stream_options is not None:
            self.stream_options.refuse_unsupported("stream_options.")
        first = [Message(role="system", content=self.instructions)] if self.instructions else []
        options = self.text or TextOptions()
        chat = ChatRequest(
            messages=_joined([*first, *earlier, *self.messages]),
            max_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            logprobs=self.has_logprobs or None,
            top_logprobs=self.top_logprobs,
            response_format=options.format.response_format if options.format else None,
            verbosity=options.verbosity,
            reasoning_effort=self.reasoning.effort if self.reasoning else None,
            tools=self.offered.functions,
            tool_choice=tool_choice_of(_tool_choice(self.tool_choice)),
            parallel_tool_calls=self.parallel_tool_calls,
            chat_template_kwargs=self.chat_template_kwargs,
        )
        chat.refuse_unsupported()
        return chat


def _joined(messages: list[Message]) -> list[Message]:
    """Join the items of one turn of the assistant: reasoning, text and calls are one message."""
    joined: list[Message] = []
    for message in messages:
        last = joined[-1] if joined else None
        if last is None or last.role != "assistant" or message.role != "assistant":
            joined.append(message)
            continue
        text = (last.content or "", message.content or "")
        thoughts = (last.reasoning_content or "", message.reasoning_content or "")
        calls = [*(last.tool_calls or ()), *(message.tool_calls or ())]
        joined[-1] = Message(
            role="assistant",
            content="\n".join(filter(None, map(_text_of, text))) or (None if calls else ""),
            reasoning_content="\n".join(filter(None, thoughts)) or None,
            tool_calls=calls or None,
        )
    return joined


def _text_of(content: Any) -> str:
    assert isinstance(content, str)
    return content


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice
