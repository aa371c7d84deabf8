"""Messages, tools and tool calls of a chat, in the form of OpenAI's chat completions."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Final, Literal

from msgspec import UNSET, Meta, UnsetType

from minisgl.core.answer import ToolCall as ParsedCall
from minisgl.errors import InvalidRequest
from minisgl.message import ChatPrompt, Role
from minisgl.server.strict import Json, ignored, only
from minisgl.utils.text import brief, num_levels

MAX_DEPTH: Final = 100
"""The most levels of `chat_template_kwargs` and of a tool's schema. Python's own limit is near
1,000 and differs between processes, so one process could write what another cannot read. Schemas of
tools have about ten levels."""

_OF_CLIENTS: Final = "Changes nothing: OpenAI's clients add it to the answers that they parse."
_TWICE: Final = "Changes nothing: reasoning_content has it."
_REPEATED: Final = "Changes nothing: OpenAI's agents for Node repeat the message's fields in parts."
_Marks = Annotated[dict[str, Any] | None, ignored("Changes nothing: prefixes need no marks.")]


class _Part(Json, tag_field="type", frozen=True, kw_only=True, omit_defaults=True):
    cache_control: _Marks = None


class TextPart(_Part, tag="text", frozen=True, kw_only=True):
    text: str
    prompt_cache_breakpoint: _Marks = None
    role: Annotated[str | None, ignored(_REPEATED)] = None
    refusal: Annotated[str | None, ignored(_REPEATED)] = None
    annotations: Annotated[list[Any] | None, ignored(_REPEATED)] = None
    tool_calls: Annotated[list[Any] | None, ignored(_REPEATED)] = None
    reasoning_content: Annotated[str | None, ignored(_REPEATED)] = None


class ImageURL(Json, frozen=True, kw_only=True, omit_defaults=True):
    url: str
    detail: Annotated[
        str | None, ignored("Changes nothing: the model's own processor sizes pictures.")
    ] = None


class ImagePart(_Part, tag="image_url", frozen=True, kw_only=True):
    image_url: ImageURL


class Prediction(Json, tag_field="type", tag="content", frozen=True, kw_only=True):
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class CalledFunction(Json, frozen=True, kw_only=True):
    name: str
    arguments: str


class ToolFunction(CalledFunction, frozen=True, kw_only=True):
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

    role: Role
    content: str | list[TextPart | ImagePart] | None = None
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
    # Mistral's client sends false with each assistant's message.
    prefix: Annotated[bool | None, only(False, why="use continue_final_message")] = None
    # LiteLLM's and OpenRouter's answers repeat the reasoning in these.
    reasoning_details: Annotated[Any, ignored(_TWICE)] = None
    thinking_blocks: Annotated[Any, ignored(_TWICE)] = None
    provider_specific_fields: Annotated[Any, ignored("Changes nothing.")] = None

    def for_template(self, path: str) -> dict[str, Any]:
        """Return the message for `ChatPrompt`. Raises InvalidRequest. path: of this message."""
        self.refuse_unsupported(f"{path}.")
        if self.content is None and self.role != "assistant":
            raise InvalidRequest(
                f"{path}.content must be text or a list of parts", param=f"{path}.content"
            )
        named = {name: getattr(self, name) for name in _TEMPLATE_FIELDS}
        if self.reasoning_content is None:
            named["reasoning_content"] = self.reasoning
        if self.tool_calls is not None:
            named["tool_calls"] = [call.for_template for call in self.tool_calls]
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


MAX_TOOLS: Final = 1024
ToolName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.:-]{1,128}$")]


class Function(Json, frozen=True, kw_only=True, omit_defaults=True):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Annotated[
        bool | None,
        ignored("Changes nothing: arguments of calls that tool_choice requires follow the schema."),
    ] = None


class Tool(Json, tag_field="type", tag="function", frozen=True, kw_only=True, omit_defaults=True):
    function: Function
    cache_control: _Marks = None

    def for_template(self) -> dict[str, Any]:
        """Return the tool for `ChatPrompt`. Raises InvalidRequest if its schema is too deep."""
        parameters = self.function.parameters or {"type": "object", "properties": {}}
        check_depth(parameters, f"tools.{self.function.name}.parameters")
        function = {"name": self.function.name, "parameters": parameters}
        if self.function.description is not None:
            function["description"] = self.function.description
        return {"type": "function", "function": function}


class ChosenFunction(Json, frozen=True, kw_only=True):
    name: str


class ChosenTool(Json, tag_field="type", tag="function", frozen=True, kw_only=True):
    function: ChosenFunction


class AllowedTools(Json, frozen=True, kw_only=True):
    """The tools of the request that the model may call."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenTool], Meta(min_length=1)]


class AllowedChoice(Json, tag_field="type", tag="allowed_tools", frozen=True, kw_only=True):
    allowed_tools: AllowedTools

    def of(self, tools: Sequence[Tool]) -> list[Tool]:
        """Return the allowed ones of `tools`. Raises InvalidRequest if one is not in `tools`."""
        names = {tool.function.name for tool in tools}
        allowed = dict.fromkeys(tool.function.name for tool in self.allowed_tools.tools)
        if unknown := [name for name in allowed if name not in names]:
            raise InvalidRequest(
                f"tool_choice allows {brief(unknown[0])}, which is not in tools",
                param="tool_choice",
            )
        return [tool for tool in tools if tool.function.name in allowed]


ToolChoice = Literal["none", "auto", "required", "any"] | ChosenTool | AllowedChoice


class AnswerCall(Json, tag_field="type", tag="function", frozen=True, kw_only=True):
    id: str
    function: CalledFunction


class FunctionDelta(Json, frozen=True, kw_only=True, omit_defaults=True):
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class CallDelta(Json, frozen=True, kw_only=True, omit_defaults=True):
    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta


def new_call_id() -> str:
    """Return nine letters and digits. Mistral's templates accept no other ids."""
    return secrets.token_hex(5)[:9]


def answer_calls(calls: Iterable[ParsedCall]) -> list[AnswerCall]:
    return [
        AnswerCall(
            id=new_call_id(), function=CalledFunction(name=call.name, arguments=call.arguments)
        )
        for call in calls
    ]


def call_begins(index: int, name: str) -> CallDelta:
    function = FunctionDelta(name=name, arguments="")
    return CallDelta(index=index, id=new_call_id(), type="function", function=function)


def call_goes_on(index: int, arguments: str) -> CallDelta:
    return CallDelta(index=index, function=FunctionDelta(arguments=arguments))
