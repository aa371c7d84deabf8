"""Messages of a chat, which become a prompt."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from msgspec import Meta

from minisgl.core.structured import num_levels
from minisgl.errors import InvalidRequest
from minisgl.message import ChatPrompt
from minisgl.server.strict import Json, ignored, only

MAX_DEPTH: Final = 100
"""The most levels of `chat_template_kwargs` and of a tool's schema. Python's own limit is near
1,000 and differs between processes, so one process could write what another cannot read. Schemas of
tools have about ten levels."""

_OF_CLIENTS: Final = "Changes nothing: OpenAI's clients add it to the answers that they parse."
_TWICE: Final = "Changes nothing: reasoning_content has it."


class TextPart(Json, tag_field="type", tag="text", frozen=True, kw_only=True, omit_defaults=True):
    text: str
    prompt_cache_breakpoint: Annotated[dict[str, Any] | None, ignored("Changes nothing.")] = None
    cache_control: Annotated[dict[str, Any] | None, ignored("Changes nothing.")] = None


class ToolFunction(Json, frozen=True, kw_only=True):
    name: str
    arguments: str
    parsed_arguments: Annotated[Any, ignored(_OF_CLIENTS)] = None


class ToolCall(Json, tag_field="type", tag="function", frozen=True, kw_only=True):
    id: str
    function: ToolFunction
    index: Annotated[int | None, ignored(_OF_CLIENTS)] = None

    @property
    def for_template(self) -> dict[str, Any]:
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {"type": "function", "id": self.id, "function": function}


class Message(Json, frozen=True, kw_only=True):
    """One message of a chat. A client can send the message of an answer back unchanged."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: str | None = None
    reasoning: Annotated[
        str | None, Meta(description="The same as reasoning_content, which is the templates' name.")
    ] = None
    refusal: Annotated[str | None, only("", why="put its text into content")] = None
    annotations: Annotated[list[Any] | None, ignored("Changes nothing.")] = None
    audio: Annotated[
        dict[str, Any] | None, only(why="this server reads text; send the transcript")
    ] = None
    function_call: Annotated[dict[str, Any] | None, only(why="use tool_calls")] = None
    parsed: Annotated[Any, ignored(_OF_CLIENTS)] = None
    # LiteLLM's and OpenRouter's answers repeat the reasoning in these.
    reasoning_details: Annotated[Any, ignored(_TWICE)] = None
    thinking_blocks: Annotated[Any, ignored(_TWICE)] = None
    provider_specific_fields: Annotated[Any, ignored("Changes nothing.")] = None

    def for_template(self, path: str) -> dict[str, Any]:
        """Return the message for `ChatPrompt`. Raises InvalidRequest. path: of this message."""
        self.refuse_unsupported(f"{path}.")
        if self.content is None and self.role != "assistant":
            raise InvalidRequest(
                f"{path}.content must be text or a list of text parts", param=f"{path}.content"
            )
        named = {name: getattr(self, name) for name in _TEMPLATE_FIELDS}
        if self.reasoning_content is None:
            named["reasoning_content"] = self.reasoning
        if self.tool_calls is not None:
            named["tool_calls"] = [call.for_template for call in self.tool_calls]
        if not self.tool_calls and self.content is None:
            named["content"] = ""
        given = {name: value for name, value in named.items() if value is not None}
        return {"role": self.role} | given


_TEMPLATE_FIELDS: Final = ("content", "name", "tool_call_id", "tool_calls", "reasoning_content")

TemplateArgs = Annotated[
    dict[str, Any] | None, Meta(description="Further variables for the chat template.")
]


def check_depth(value: Any, path: str) -> None:
    """Raise InvalidRequest if `value` has more than `MAX_DEPTH` levels. path: of the field."""
    if num_levels(value, MAX_DEPTH) > MAX_DEPTH:
        raise InvalidRequest(
            f"{path} has more than {MAX_DEPTH} levels of nested objects and lists", param=path
        )


def chat_prompt(messages: list[Message], template_args: dict[str, Any] | None) -> ChatPrompt:
    """Return the prompt of a chat. Raises InvalidRequest."""
    if template_args and "messages" in template_args:
        raise InvalidRequest(
            "chat_template_kwargs must not have messages: they are a field of the request",
            param="chat_template_kwargs",
        )
    check_depth(template_args, "chat_template_kwargs")
    return ChatPrompt(
        messages=[message.for_template(f"messages[{i}]") for i, message in enumerate(messages)],
        template_args=template_args or {},
    )
