"""Checks the tools of `LLM.chat`, and makes fields of a `ChatPrompt` from them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from minisgl.errors import InvalidRequest
from minisgl.utils.text import brief

NAME: Final = re.compile(r"[a-zA-Z0-9_.:-]{1,128}")
CHOICES: Final = ("auto", "none", "required")


def prompt_fields(tools: Any, tool_choice: Any) -> dict[str, Any]:
    """Return the fields of a prompt whose answer is split. Raises InvalidRequest."""
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise InvalidRequest(
            "tools must be a list of functions in OpenAI's form"
            + ("; tool_choice needs it" if tools is None else f", got {brief(tools)}"),
            param="tools",
        )
    checked = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    choice = _choice(tool_choice)
    is_left_out = choice == "none"
    return {
        "tools": [] if is_left_out else checked,
        "tool_choice": "auto" if is_left_out else choice,
        "is_split": True,
    }


def _tool(tool: Any, path: str) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or tool.get("type", "function") != "function":
        raise InvalidRequest(
            f'{path} must be like {{"type": "function", "function": {{"name": "f"}}}}, '
            f"got {brief(tool)}",
            param="tools",
        )
    name, schema = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise InvalidRequest(
            f"{path}.function.name must have 1 to 128 letters, digits and _.:-, got {brief(name)}",
            param="tools",
        )
    if schema is not None and not isinstance(schema, Mapping):
        raise InvalidRequest(
            f"{path}.function.parameters must be a JSON schema, got {brief(schema)}", param="tools"
        )
    if unknown := sorted(set(function) - {"name", "description", "parameters", "strict"}):
        raise InvalidRequest(
            f"{path}.function has no field {', '.join(map(str, unknown))}", param="tools"
        )
    checked = {"name": name, "parameters": dict(schema or {"type": "object", "properties": {}})}
    if function.get("description") is not None:
        checked["description"] = str(function["description"])
    return {"type": "function", "function": checked}


def _choice(choice: Any) -> str:
    if isinstance(choice, Mapping):
        function = choice.get("function")
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            name: str = function["name"]
            return name
    elif choice in CHOICES:
        return str(choice)
    raise InvalidRequest(
        'tool_choice must be "auto", "none", "required" or {"type": "function", "function": '
        f'{{"name": ...}}}}, got {brief(choice)}',
        param="tool_choice",
    )
