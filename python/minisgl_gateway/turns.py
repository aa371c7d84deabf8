"""Messages, tools and calls of other forms as those of chat completions."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from itertools import groupby
from typing import Any

import msgspec

from minisgl.server.api.messages import Message, Tool, ToolChoice
from minisgl.server.strict import field_error
from minisgl_gateway.pictures import lines


def joined(messages: Iterable[Message], roles: Container[str]) -> list[Message]:
    """Join successive messages of the same role if `roles` has it: their texts, with line breaks
    between them, their pictures and their calls."""
    turns: list[Message] = []
    for role, successive in groupby(messages, lambda message: message.role):
        run = list(successive)
        if role not in roles or len(run) == 1:
            turns += run
            continue
        calls = [call for message in run for call in message.tool_calls or ()]
        thoughts = "\n".join(filter(None, (message.reasoning_content for message in run)))
        turn = msgspec.structs.replace(
            run[0],
            content=lines([message.content for message in run]) or (None if calls else ""),
            reasoning_content=thoughts or None,
            tool_calls=calls or None,
        )
        turns.append(turn)
    return turns


def tools_of(values: Sequence[Any]) -> list[Tool]:
    """Decode tools in the form of chat completions. Raises InvalidRequest with the index."""
    return [decoded(value, Tool, f"tools[{index}]") for index, value in enumerate(values)]


def tool_choice_of(value: Any) -> ToolChoice | None:
    """Decode a choice in the form of chat completions. Raises InvalidRequest."""
    choice: ToolChoice | None = decoded(value, ToolChoice | None, "tool_choice")
    return choice


def decoded(value: Any, kind: Any, path: str) -> Any:
    """Decode a value of type `kind` at `path` of the body. Raises InvalidRequest."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise field_error(str(error), kind, path) from None


def call_input(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call as an object: the JSON object that the model wrote, or
    {"arguments": TEXT} if it wrote another text."""
    try:
        return msgspec.json.decode(arguments or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return {"arguments": arguments}
