"""The request of POST /v1/responses, and the `ChatRequest` that it becomes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from minisgl.errors import InvalidRequest
from minisgl.server.api.chat import ChatRequest
from minisgl.server.api.left_out import Omission
from minisgl.server.api.messages import Message, TemplateArgs
from minisgl.server.api.schema import (
    CacheKey,
    CacheOptions,
    CacheRetention,
    Moderation,
    Positive,
    StreamOptions,
    Timeout,
)
from minisgl.server.api.structured import JsonSchema, ResponseFormat
from minisgl.server.strict import Json, ignored, only
from minisgl_gateway.responses.items import InputItem
from minisgl_gateway.responses.tools import NameChoice, OfferedTools, chat_choice, offered_tools
from minisgl_gateway.turns import joined

LOGPROBS: Final = "message.output_text.logprobs"
Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
"""Only the first changes an answer. The others are for items that this server never sends."""


class TextFormat(JsonSchema, frozen=True, kw_only=True):
    """A `ResponseFormat` that has the fields of its `json_schema` itself."""

    type: Literal["text", "json_object", "json_schema"]

    @property
    def response_format(self) -> ResponseFormat:
        given = {name: getattr(self, name) for name in JsonSchema.__struct_fields__}
        return ResponseFormat(type=self.type, json_schema=JsonSchema(**given))


NAMES: Final = {
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
}
"""The request's names of fields, by their names in chat completions."""


class TextOptions(Json, frozen=True, kw_only=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(Json, frozen=True, kw_only=True):
    effort: str | None = None
    summary: Annotated[str | None, ignored("Changes nothing: reasoning is shown whole.")] = None
    generate_summary: Annotated[str | None, ignored("Changes nothing.")] = None
    context: Annotated[str | None, only("auto", why="the chat template decides")] = None
    mode: Annotated[str | None, only("standard", why="there is one mode")] = None


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
    tool_choice: NameChoice | None = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    background: Annotated[bool | None, only(False, why="wait for the answer or stream it")] = None
    background_options: Annotated[dict[str, Any] | None, only(why="there is none")] = None
    conversation: Annotated[Any, only(why="use previous_response_id")] = None
    context_management: Annotated[
        list[Any] | None, only([], why="shorten the input in the client")
    ] = None
    max_tool_calls: Annotated[
        int | None, ignored("Changes nothing: it limits hosted tools, and none run here.")
    ] = None
    prompt: Annotated[dict[str, Any] | None, only(why="send the prompt's text")] = None
    moderation: Moderation = None
    access_programs: Annotated[dict[str, Any] | None, only(why="there are none")] = None
    image: Annotated[dict[str, Any] | None, only(why="this server writes text only")] = None
    service_tier: Annotated[str | None, ignored("Changes nothing: there is one tier.")] = None
    prompt_cache_options: CacheOptions = None
    prompt_cache_retention: CacheRetention = None
    prompt_cache_key: CacheKey = None
    safety_identifier: Annotated[str | None, ignored("Changes nothing.")] = None
    user: Annotated[str | None, ignored("Changes nothing.")] = None
    client_metadata: Annotated[
        dict[str, Any] | None, ignored("Changes nothing: Codex names its turns in it.")
    ] = None

    chat_template_kwargs: TemplateArgs = None
    timeout: Timeout = None

    def resolved(self, item_of: Callable[[str, str], Json]) -> ResponsesRequest:
        """Return the request with items in place of references to them (`InputItem.resolved`)."""
        if isinstance(self.input, str):
            return self
        items = [item.resolved(item_of, f"input[{i}]") for i, item in enumerate(self.input)]
        return msgspec.structs.replace(self, input=items)

    @property
    def messages(self) -> list[Message]:
        """The chat messages of `input`. Raises InvalidRequest."""
        if isinstance(self.input, str):
            return [Message(role="user", content=self.input)]
        items = [item.message(f"input[{i}]") for i, item in enumerate(self.input)]
        messages = [message for message in items if message is not None]
        if not messages:
            raise InvalidRequest("input must have at least one item", param="input")
        return messages

    @property
    def offered(self) -> OfferedTools:
        """The decoded `tools`. Raises InvalidRequest."""
        return offered_tools(self.tools or ())

    @property
    def left_out(self) -> list[Omission]:
        """The tools, items and options that `chat` leaves out. Raises InvalidRequest."""
        items = self.input if isinstance(self.input, list) else []
        left_out = [each for i, item in enumerate(items) for each in item.left_out(f"input[{i}]")]
        if self.text and self.text.verbosity not in (None, "medium"):
            left_out.append(Omission("text.verbosity", "text.verbosity"))
        if self.truncation == "auto":  # an input that does not fit is refused
            left_out.append(Omission("truncation", "truncation"))
        return [*self.offered.left_out, *left_out]

    @property
    def has_logprobs(self) -> bool:
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())

    def chat(self, earlier: list[Message]) -> ChatRequest:
        """Return the same request to chat completions. Raises InvalidRequest.

        earlier: the messages of earlier turns.
        """
        reasoning, options = self.reasoning or Reasoning(), self.text or TextOptions()
        reasoning.refuse_unsupported("reasoning.")
        if self.stream_options is not None:
            self.stream_options.refuse_unsupported("stream_options.")
        first = [Message(role="system", content=self.instructions)] if self.instructions else []
        chat = ChatRequest(
            model=self.model,
            messages=joined([*first, *earlier, *self.messages], ("assistant",)),
            max_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            logprobs=self.has_logprobs or None,
            top_logprobs=self.top_logprobs,
            response_format=options.format.response_format if options.format else None,
            reasoning_effort=reasoning.effort,
            tools=self.offered.functions,
            tool_choice=chat_choice(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls,
            chat_template_kwargs=self.chat_template_kwargs,
            stream=self.stream,
            timeout=self.timeout,
        )
        chat.refuse_unsupported()
        return chat
