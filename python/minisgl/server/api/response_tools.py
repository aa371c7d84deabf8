"""The tools of POST /v1/responses: functions, namespaces of functions, and hosted tools.

A function in a namespace has both names with a dot between them in the chat, because chat templates
know functions only. OpenAI runs hosted tools itself. Agents ask for the search of the web by
default, and with `tool_choice` "auto" a model need not use a tool, so it is left out, and the
answer's header says so. The others are refused: they need the client's data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from minisgl.errors import InvalidRequest
from minisgl.server.api.tools import Tool, tool_of

SEARCH: Final = "web_search"
"""How the types of this tool begin; some have a date behind it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedTools:
    """functions: as chat completions have them. given: the request's tools without those in
    `left_out`. left_out: "tools[1] (web_search)". namespaces: (namespace, name) of the functions
    that are in one, by their names in the chat.
    """

    functions: list[Tool] = field(default_factory=list)
    given: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    namespaces: dict[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def warning(self) -> str:
        """Of the answer's header; "" if every tool is offered."""
        if not self.left_out:
            return ""
        return f"this server does not search the web: {', '.join(self.left_out)} left out"


def offered_tools(tools: Sequence[dict[str, Any]]) -> OfferedTools:
    """Raises InvalidRequest, which names the wrong one."""
    offered = OfferedTools()
    for index, tool in enumerate(tools):
        path, kind = f"tools[{index}]", tool.get("type")
        if isinstance(kind, str) and kind.startswith(SEARCH):
            offered.left_out.append(f"{path} ({kind})")
            continue
        if kind == "namespace":
            _add_namespace(offered, tool, path)
        else:
            offered.functions.append(_function(tool, path))
        offered.given.append(tool)
    return offered


def _add_namespace(offered: OfferedTools, tool: dict[str, Any], path: str) -> None:
    namespace, members = tool.get("name"), tool.get("tools")
    if not isinstance(namespace, str) or not namespace:
        raise InvalidRequest(f"{path}.name must be the namespace's name", param=path)
    if not isinstance(tool.get("description", ""), str):
        raise InvalidRequest(f"{path}.description must be a text", param=path)
    if not isinstance(members, list) or not all(isinstance(each, dict) for each in members):
        raise InvalidRequest(f"{path}.tools must be a list of functions", param=path)
    for number, member in enumerate(members):
        given = _function(member, f"{path}.tools[{number}]").function
        full_name = f"{namespace}.{given.name}"
        about = "\n".join(filter(None, (tool.get("description"), given.description)))
        renamed = {**member, "name": full_name, "description": about}
        offered.functions.append(_function(renamed, f"{path}.tools[{number}]"))
        offered.namespaces[full_name] = (namespace, given.name)


def _function(tool: dict[str, Any], path: str) -> Tool:
    if tool.get("type") != "function":
        raise InvalidRequest(
            f"{path}.type must be function, namespace or web_search, got {tool.get('type')!r}: run "
            "other tools in the client, as functions",
            param=path,
        )
    function = {key: value for key, value in tool.items() if key != "type"}
    return tool_of({"type": "function", "function": function}, path)
