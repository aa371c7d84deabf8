"""Rewrites messages for chat templates that take no tools, or do not write every tool call."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, Final

from minisgl.errors import InvalidRequest
from minisgl.tokenizer.template import ChatTemplate, Part
from minisgl_zoo.calls.formats import CallFormat
from minisgl_zoo.calls.known import CALLS

TOOLS_TEXT: Final = """You can call functions to help with the task. These are their signatures:
<tools>
{tools}
</tools>
To call one, write a JSON object with its name and arguments:
<tool_call>
{{"name": "...", "arguments": {{...}}}}
</tool_call>"""
"""The tags are those of the Hermes models."""

# Messages and tools with which templates are probed.
_NAME: Final = "probe_7c1f"
_USER: Final = {"role": "user", "content": "a"}
_TOOL: Final = {
    "type": "function",
    "function": {"name": _NAME, "description": "", "parameters": {"type": "object"}},
}
_NO_ARGUMENTS: Final[dict[str, Any]] = {"type": "object", "properties": {}}
_BARE_TOOL: Final = {"type": "function", "function": {"name": _NAME}}
_CALL: Final[dict[str, Any]] = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": _NAME, "arguments": {"a": "b"}},
}
_SECOND: Final = "probe_2e5a"
_SECOND_CALL: Final[dict[str, Any]] = {
    **_CALL,
    "id": "abcdefghj",
    "function": {**_CALL["function"], "name": _SECOND},
}
_SYSTEM: Final = {"role": "system", "content": _NAME}
_ANSWER: Final[dict[str, Any]] = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_ANSWER_OTHER_ID: Final = {**_ANSWER, "tool_calls": [{**_CALL, "id": "call_1"}]}
_ANSWER_TWO: Final = {**_ANSWER, "tool_calls": [_CALL, _SECOND_CALL]}


def takes_tools(template: ChatTemplate) -> bool:
    """Return whether the template writes `tools` into the prompt."""
    return "tools" in template.source and _writes(template, [_USER], {"tools": [_TOOL]})


def whole_tools(
    tools: Sequence[Mapping[str, Any]], template: ChatTemplate
) -> Sequence[Mapping[str, Any]]:
    """Return the tools for a template that takes tools.

    If it refuses a tool that has only a name, each tool gets the fields that it lacks: an empty
    description, and parameters without properties.
    """
    if not _refuses(template, [_USER], {"tools": [_BARE_TOOL]}):
        return tools
    shown = []
    for tool in tools:
        function = {"description": "", **tool["function"]}
        function["parameters"] = {**_NO_ARGUMENTS, **function.get("parameters", {})}
        shown.append({**tool, "function": function})
    return shown


def plain_messages(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    template: ChatTemplate,
    calls: str,
) -> list[dict[str, Any]]:
    """Return messages of the same meaning, all of which the template writes.

    - If the template refuses common ids of calls, ids become nine letters and digits (Mistral).
    - If it writes only the first of several calls (gpt-oss) or refuses several (Llama 3), each call
      gets a message of its own, followed by its result.
    - If it writes no calls, they become content, in the format `calls`.
    - If it takes no tools, the system message describes them, or the first message if the template
      takes no system message. Calls become content, and results become messages of the user.
    """
    shown = [dict(message) for message in messages]
    form = CALLS.get(calls)
    if form is None or form.syntax not in ("object", "python"):
        form = CALLS["hermes"]
    takes, has_calls = takes_tools(template), any(message.get("tool_calls") for message in shown)
    is_plain = has_calls and not _writes(template, [_USER, _ANSWER], {})
    if is_plain or (tools and not takes):
        shown = [_with_calls(message, form) for message in shown]
        shown = shown if takes else _with_results(shown)
    elif has_calls:
        if _refuses(template, [_USER, _ANSWER_OTHER_ID]) and not _refuses(
            template, [_USER, _ANSWER]
        ):
            shown = [_with_short_ids(message) for message in shown]
        is_alone = _refuses(template, [_USER, _ANSWER_TWO]) and not _refuses(
            template, [_USER, _ANSWER]
        )
        if is_alone or not _writes(template, [_USER, _ANSWER_TWO], {}, _SECOND):
            shown = _one_call_each(shown)
    if takes or not tools:
        return shown
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = TOOLS_TEXT.format(tools=lines)
    if shown and shown[0].get("role") in ("system", "developer"):
        return [_before(shown[0], text, is_last=True), *shown[1:]]
    if _writes(template, [_SYSTEM, _USER], {}) or not shown:
        return [{"role": "system", "content": text}, *shown]
    return [_before(shown[0], text), *shown[1:]]


def _writes(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    args: Mapping[str, Any],
    name: str = _NAME,
) -> bool:
    """Return whether the template writes `name`, which the probe `messages` has.

    If it refuses the probe, it may do so for another reason, so the answer is True; but False if
    the probe begins with a system message.
    """
    try:
        return name in template.render(messages, args)
    except InvalidRequest:
        return messages[0] is not _SYSTEM


def _refuses(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    args: Mapping[str, Any] | None = None,
) -> bool:
    try:
        template.render(messages, args)
    except InvalidRequest:
        return True
    return False


def _with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with ids of calls as nine letters and digits. Equal ids stay equal."""
    changed = dict(message)
    if isinstance(message.get("tool_call_id"), str):
        changed["tool_call_id"] = _short(message["tool_call_id"])
    if calls := message.get("tool_calls"):
        changed["tool_calls"] = [{**call, "id": _short(str(call.get("id")))} for call in calls]
    return changed


def _short(id: str) -> str:
    is_short = len(id) == 9 and id.isascii() and id.isalnum()
    return id if is_short else hashlib.sha256(id.encode("utf-8", "replace")).hexdigest()[:9]


def _one_call_each(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with each call in a message of its own. The results of the calls follow
    them by id."""
    shown: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        calls = message.get("tool_calls") or []
        if len(calls) > 1:
            results = list(
                takewhile(lambda each: each.get("role") == "tool", messages[index + 1 :])
            )
            for number, call in enumerate(calls):
                said = message if not number else {"role": "assistant", "content": ""}
                own = [each for each in results if each.get("tool_call_id") == call.get("id")]
                shown += [{**said, "tool_calls": [call]}, *own]
            ids = [call.get("id") for call in calls]
            left = [each for each in results if each.get("tool_call_id") not in ids]
            shown += left
        elif message.get("role") != "tool" or not _follows_several(messages, index):
            shown.append(message)
    return shown


def _follows_several(messages: Sequence[Mapping[str, Any]], index: int) -> bool:
    """Return whether the result at `index` belongs to a message with several calls."""
    while index and messages[index].get("role") == "tool":
        index -= 1
    return len(messages[index].get("tool_calls") or ()) > 1


def _with_calls(message: dict[str, Any], form: CallFormat) -> dict[str, Any]:
    """Return the message with its calls as content, in the format `form`."""
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    if not message.get("tool_calls"):
        return rest
    texts = list(filter(None, [_text(message.get("content"))]))
    if form.syntax == "python":
        calls = ", ".join(_python(call["function"]) for call in message["tool_calls"])
        return {**rest, "content": "\n".join([*texts, f"{form.begin}[{calls}]{form.end}"])}
    for call in message["tool_calls"]:
        function = call["function"]
        name, arguments = json.dumps(function["name"]), function.get("arguments") or "{}"
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        body = f'{{"{form.name_key}": {name}, "{form.key}": {arguments}}}'
        texts.append(f"{form.begin}\n{body}\n{form.end}".rstrip())
    return {**rest, "content": "\n".join(texts)}


def _python(function: Mapping[str, Any]) -> str:
    """Return a call as Python writes it."""
    values = function.get("arguments") or {}
    if isinstance(values, str):
        with contextlib.suppress(ValueError, RecursionError):
            values = json.loads(values)
    if not isinstance(values, dict):  # a model's earlier mistake, which stays as it is
        return f"{function['name']}({values})"
    return f"{function['name']}({', '.join(f'{key}={value!r}' for key, value in values.items())})"


def _with_results(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with consecutive results as one message of the user, because templates
    require that roles alternate."""
    shown: list[dict[str, Any]] = []
    is_result = False
    for message in messages:
        was_result, is_result = is_result, message.get("role") == "tool"
        if not is_result:
            shown.append(message)
            continue
        text = f"<tool_response>\n{_text(message.get('content'))}\n</tool_response>"
        if was_result:
            shown[-1]["content"] += f"\n{text}"
        else:
            shown.append({"role": "user", "content": text})
    return shown


def _before(message: dict[str, Any], text: str, *, is_last: bool = False) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, list) and any(isinstance(part, Part) for part in content):
        more = {"type": "text", "text": f"\n\n{text}" if is_last else f"{text}\n\n"}
        return {**message, "content": [*content, more] if is_last else [more, *content]}
    own = _text(content)
    return {**message, "content": f"{own}\n\n{text}" if is_last else f"{text}\n\n{own}"}


def _text(content: Any) -> str:
    """Return the text of a message's content. Parts without text are refused later."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content or "")
