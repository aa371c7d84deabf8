"""The tools of POST /v1/responses: functions, custom tools, namespaces of both, and hosted tools.

Chat templates know only functions. So in the chat a custom tool, whose input is a text, is a
function with one argument, and a tool in a namespace has the name NAMESPACE.NAME. Hosted tools run
at OpenAI. Those that agents offer by default are left out, because a model need not use a tool when
`tool_choice` is "auto". The others are refused, because they need the client's data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

import msgspec

from minisgl.errors import InvalidRequest
from minisgl.server.api.left_out import Omission
from minisgl.server.api.messages import (
    AllowedChoice,
    AllowedTools,
    ChosenFunction,
    ChosenTool,
    Function,
    Tool,
    ToolChoice,
)
from minisgl.server.strict import Json
from minisgl.utils.text import brief
from minisgl_gateway.turns import call_input, decoded

HOSTED_BY_DEFAULT: Final = ("web_search", "tool_search", "image_generation")
"""The types of hosted tools that agents offer by default. A date may follow each."""

INPUT: Final = "input"
"""The argument of a custom tool."""

_NEUTRAL: Final = ("defer_loading", "output_schema")
"""Fields of a tool that change nothing, because all tools are offered at once."""


class FunctionName(Json, tag_field="type", tag="function", frozen=True, kw_only=True):
    name: str


class CustomName(Json, tag_field="type", tag="custom", frozen=True, kw_only=True):
    name: str


class AllowedNames(Json, tag_field="type", tag="allowed_tools", frozen=True, kw_only=True):
    """The tools of the request that the model may call."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionName | CustomName], msgspec.Meta(min_length=1)]


NameChoice = Literal["none", "auto", "required"] | FunctionName | CustomName | AllowedNames


def chat_choice(choice: NameChoice | None) -> ToolChoice | None:
    """Return the choice in the form of chat completions."""
    if isinstance(choice, FunctionName | CustomName):
        return _chosen(choice)
    if isinstance(choice, AllowedNames):
        tools = [_chosen(each) for each in choice.tools]
        return AllowedChoice(allowed_tools=AllowedTools(mode=choice.mode, tools=tools))
    return choice


def _chosen(tool: FunctionName | CustomName) -> ChosenTool:
    return ChosenTool(function=ChosenFunction(name=tool.name))


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedTools:
    """The tools of a request.

    functions: in the form of chat completions. given: the request's tools except those that are
    left out. namespaces: (namespace, name) of each function in a namespace, by its name in the
    chat. custom: the custom tools' names in the chat.
    """

    functions: list[Tool] = field(default_factory=list)
    given: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[Omission] = field(default_factory=list)
    namespaces: dict[str, tuple[str, str]] = field(default_factory=dict)
    custom: set[str] = field(default_factory=set)


def offered_tools(tools: Sequence[dict[str, Any]]) -> OfferedTools:
    """Decode the tools of a request. Raises InvalidRequest with the index of a wrong one."""
    offered = OfferedTools()
    for index, tool in enumerate(tools):
        path, kind = f"tools[{index}]", str(tool.get("type"))
        if hosted := next((name for name in HOSTED_BY_DEFAULT if kind.startswith(name)), ""):
            offered.left_out.append(Omission(path, hosted))
            continue
        if kind == "namespace":
            _add_namespace(offered, tool, path)
        else:
            _add(offered, tool, path)
        offered.given.append(tool)
    return offered


def custom_input(arguments: str) -> str:
    """Return the input of a custom tool from the arguments of a model's call: the argument `INPUT`,
    or all of them if that is missing."""
    text = call_input(arguments).get(INPUT)
    return text if isinstance(text, str) else arguments


def custom_arguments(text: str) -> str:
    """Return the arguments of a call whose input of a custom tool is `text`."""
    return msgspec.json.encode({INPUT: text}).decode()


def _add_namespace(offered: OfferedTools, tool: dict[str, Any], path: str) -> None:
    namespace, members = tool.get("name"), tool.get("tools")
    if not isinstance(namespace, str) or not namespace:
        raise InvalidRequest(f"{path}.name must be the namespace's name", param=path)
    if not isinstance(tool.get("description"), str | None):
        raise InvalidRequest(f"{path}.description must be a text", param=path)
    if not isinstance(members, list) or not all(isinstance(each, dict) for each in members):
        raise InvalidRequest(f"{path}.tools must be a list of functions", param=path)
    for number, member in enumerate(members):
        member_path = f"{path}.tools[{number}]"
        full = dict(member)  # `_add` refuses a name or a description that is no text
        if isinstance(name := member.get("name"), str):
            full["name"] = f"{namespace}.{name}"
        if isinstance(about := member.get("description"), str | None):
            full["description"] = "\n".join(filter(None, (tool.get("description"), about)))
        _add(offered, full, member_path)
        offered.namespaces[full["name"]] = (namespace, str(name))


def _add(offered: OfferedTools, tool: dict[str, Any], path: str) -> None:
    """Add a function or a custom tool."""
    kind = tool.get("type")
    if kind not in ("function", "custom"):
        raise InvalidRequest(
            f"{path}.type must be function, custom or namespace, got {brief(str(kind))}: run other "
            "tools in the client, as functions",
            param=path,
        )
    given = {key: value for key, value in tool.items() if key not in ("type", *_NEUTRAL)}
    for key, value in (("async", False), ("allowed_callers", ["direct"])):
        if given.pop(key, None) not in (None, value):
            shown = msgspec.json.encode(value).decode()
            raise InvalidRequest(f"{path}.{key} must be {shown}", param=f"{path}.{key}")
    if kind == "custom":
        given = _function_of(given, path)
    function = decoded(given, Function, path)
    offered.functions.append(Tool(function=function))
    if kind == "custom":
        offered.custom.add(function.name)


def _function_of(tool: dict[str, Any], path: str) -> dict[str, Any]:
    """Return the function for a custom tool. Its description has the tool's grammar."""
    form = tool.pop("format", None) or {"type": "text"}
    about = [tool.get("description")]
    if isinstance(form, dict) and form.get("type") == "grammar":
        about.append(f"The {INPUT} follows this {form.get('syntax')} grammar:")
        about.append(form.get("definition"))
    elif not isinstance(form, dict) or form.get("type") != "text":
        raise InvalidRequest(
            f'{path}.format must be {{"type": "text"}}, or a grammar with syntax and definition',
            param=f"{path}.format",
        )
    if not all(isinstance(each, str | None) for each in about):
        raise InvalidRequest(
            f"{path}: description, format.syntax and format.definition must be texts", param=path
        )
    text = {"type": "string", "description": "The input of this tool, as plain text."}
    return {
        **tool,
        "description": "\n".join(filter(None, about)),
        "parameters": {
            "type": "object",
            "properties": {INPUT: text},
            "required": [INPUT],
            "additionalProperties": False,
        },
    }
