"""Tools and tool calls in the form of OpenAI's chat completions."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Final, Literal

from msgspec import UNSET, Meta, UnsetType

from minisgl.core.answer import ToolCall as ParsedCall
from minisgl.errors import InvalidRequest
from minisgl.server.api.messages import check_depth
from minisgl.server.strict import Json, ignored
from minisgl.utils.text import brief

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
    cache_control: Annotated[
        dict[str, Any] | None, ignored("Changes nothing: equal prefixes are found without marks.")
    ] = None

    def for_template(self, path: str) -> dict[str, Any]:
        """Return the tool for `ChatPrompt`. Raises InvalidRequest if its schema is too deep."""
        parameters = self.function.parameters or {"type": "object", "properties": {}}
        check_depth(parameters, f"{path}.function.parameters")
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
        allowed = [tool.function.name for tool in self.allowed_tools.tools]
        if unknown := [name for name in allowed if name not in names]:
            raise InvalidRequest(
                f"tool_choice allows {brief(unknown[0])}, which is not in tools",
                param="tool_choice",
            )
        return [tool for tool in tools if tool.function.name in allowed]


ToolChoice = Literal["none", "auto", "required"] | ChosenTool | AllowedChoice


class CalledFunction(Json, frozen=True, kw_only=True):
    name: str
    arguments: str


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
