"""The plan of a chat's answer: the formats of its parts, and the calls that it must have.

The formats are those of the checkpoint's chat template. If it takes no tools, a system message in
Hermes' format describes them, and calls are read in that format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from minisgl.errors import InvalidRequest
from minisgl.message import ChatPrompt, ids_to_bytes
from minisgl.tokenizer.tokenize import Encoded, PromptEncoder
from minisgl.utils.text import brief
from minisgl_zoo.calls.known import (
    MESSAGES,
    REASONING,
    detect_calls,
    detect_reasoning,
    detect_switch,
)
from minisgl_zoo.calls.parser import AnswerForm
from minisgl_zoo.calls.tool_text import plain_messages, takes_tools, whole_tools
from minisgl_zoo.grammar.calls import Tool
from minisgl_zoo.grammar.constraint import AnswerPlan
from minisgl_zoo.grammar.forms import json_text

ANY_TOOL: Final = ("auto", "required")
"""Values of `tool_choice` that allow each tool."""
SWITCH: Final = "enable_thinking"
"""Clients switch reasoning on and off by this name. A template may have another name for it."""


STRENGTH: Final = "reasoning_strength"
"""Muse Glimmer's name for `reasoning_effort`, from low on: it cannot be switched off."""


def encode_chat(
    encoder: PromptEncoder, prompt: ChatPrompt, check: Callable[[str], object]
) -> Encoded:
    """Return a chat's prompt, with the plan of its answer if that may have parts.

    check: gets the prompt's text before it is encoded, and may raise. Raises InvalidRequest.
    """
    texts: list[str] = []

    def keep(text: str) -> None:
        check(text)
        texts.append(text)

    template = encoder.template.source
    tools = [_tool(tool) for tool in prompt.tools]
    _check_tools(tools, prompt.tool_choice)
    takes = bool(prompt.tools) and takes_tools(encoder.template)
    messages, args = list(prompt.messages), _template_args(prompt, template)
    if takes:
        args["tools"] = whole_tools(prompt.tools, encoder.template)
    detected = detect_calls(template)
    if prompt.tools or any(message.get("tool_calls") for message in messages):
        calls = encoder.tool_call_parser or detected
        messages = plain_messages(messages, prompt.tools, encoder.template, calls)
    ids = ids_to_bytes(encoder.chat.encode(messages, args, keep))
    parser = encoder.tool_call_parser or (detected if takes else "") or "hermes"
    form = _form(prompt, texts[0], template, parser, tools)
    if form is None:
        return Encoded(ids)
    plan = AnswerPlan(
        form=form,
        tools=tuple(tool for tool in tools if prompt.tool_choice in (*ANY_TOOL, tool[0])),
        choice=prompt.tool_choice,
        is_parallel=prompt.parallel_tool_calls,
        thinking_budget=prompt.thinking_budget if form.reasoning else None,
    )
    return Encoded(ids, plan)


def _template_args(prompt: ChatPrompt, template: str) -> dict[str, Any]:
    """Return the client's variables for the template.

    `enable_thinking` and `reasoning_effort` also set the template's own switch of reasoning, if it
    has one and the client does not set it. Raises InvalidRequest for an effort without a switch.
    """
    args = dict(prompt.template_args)
    effort, switch = args.get("reasoning_effort"), detect_switch(template)
    if effort is not None and STRENGTH in template:
        args.setdefault(STRENGTH, "low" if effort in ("none", "minimal") else effort)
        return args
    if switch and SWITCH in args:
        args.setdefault(switch, args[SWITCH])
    if effort is not None and "reasoning_effort" not in template:
        if not switch:
            raise InvalidRequest(
                "reasoning_effort: the chat template of this model reads no effort, and has no "
                "switch of reasoning; leave it out",
                param="reasoning_effort",
            )
        args.setdefault(switch, effort not in ("none", "minimal"))
    return args


def _form(
    prompt: ChatPrompt,
    text: str,
    template: str,
    parser: str,
    tools: Sequence[Tool],
) -> AnswerForm | None:
    """Return the formats of the answer's parts; None if the answer can only be text.

    text: the rendered prompt. template: the source of the chat template. parser: the format of
    calls.
    """
    calls = parser if tools else ""
    of_messages = [name for name in (parser, detect_calls(template)) if name in MESSAGES]
    known = next(iter(of_messages), detect_reasoning(template))
    reasoning = known
    is_open = False
    if reasoning and reasoning not in MESSAGES:
        begin, end = REASONING[reasoning]
        tail = text.rstrip()
        is_open = tail.endswith(begin)
        if tail.endswith(end) or prompt.template_args.get("continue_final_message"):
            reasoning = ""
    if prompt.thinking_budget is not None and not known:
        raise InvalidRequest(
            "thinking_budget needs a model with reasoning, and the chat template of this model has "
            "none; leave it out",
            param="thinking_budget",
        )
    if not calls and not reasoning:
        return None
    types = {name: _types(schema) for name, schema in tools}
    return AnswerForm(calls=calls, reasoning=reasoning, is_open=is_open, types=types)


def _check_tools(tools: Sequence[Tool], choice: str) -> None:
    """Raise InvalidRequest if two tools have one name, or if `choice` needs a tool that is not
    there."""
    names = [name for name, _ in tools]
    if choice == "required" and not names:
        raise InvalidRequest(
            "tool_choice is 'required', and there are no tools", param="tool_choice"
        )
    if choice not in (*ANY_TOOL, *names):
        raise InvalidRequest(
            f"tool_choice names {brief(choice)}, and no tool has that name", param="tool_choice"
        )
    if len(set(names)) != len(names):
        raise InvalidRequest("two tools have the same name", param="tools")


def _tool(tool: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return (name, schema of the arguments). Raises InvalidRequest for a bad schema: it names the
    tool, as the place in the request's list may be another one."""
    function = tool["function"]
    schema = function.get("parameters") or {"type": "object", "properties": {}}
    path = f"tools.{function['name']}.parameters"
    if schema.get("type", "object") != "object":
        raise InvalidRequest(f"{path} must be the schema of an object", param=path)
    json_text(schema, path)
    return function["name"], {"type": "object", **schema}


def _types(schema: Mapping[str, Any]) -> dict[str, str]:
    """Return the JSON type of each argument; "" if the schema has not exactly one."""
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return {}
    types = {name: part.get("type") for name, part in properties.items() if isinstance(part, dict)}
    return {name: kind if isinstance(kind, str) else "" for name, kind in types.items()}
