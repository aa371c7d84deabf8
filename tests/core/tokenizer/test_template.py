"""The same prompt as transformers' apply_chat_template, and refusals that a client can read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.chat_templates import (
    ASSISTANT,
    CALL,
    CHATML,
    CHATS,
    QWEN3,
    TEMPLATES,
    TOOL_CHAT,
    TOOLS,
    USER,
    folder_with,
    template_of,
)
from helpers.text_checkpoints import make
from minisgl.errors import InvalidRequest
from minisgl.tokenizer.template import ChatTemplate


def _theirs(folder: Path, messages: list[dict[str, Any]], **args: Any) -> str:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder))
    args = {"add_generation_prompt": True, **args}
    text = tokenizer.apply_chat_template(messages, tokenize=False, **args)
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("name", TEMPLATES)
def test_same_as_transformers(name: str, tmp_path: Path) -> None:
    folder = folder_with(tmp_path, TEMPLATES[name])
    template = template_of(folder)
    for chat in CHATS.values():
        assert template.render(chat) == _theirs(folder, chat)
    for args in ({"add_generation_prompt": False}, {"enable_thinking": False}):
        assert template.render([USER], args) == _theirs(folder, [USER], **args)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("begun", ["It is 4", "It is ", " so\n", "4 4"])
def test_a_final_message_is_continued_as_transformers_does(
    name: str, begun: str, tmp_path: Path
) -> None:
    folder = folder_with(tmp_path, TEMPLATES[name])
    chat = [USER, {"role": "assistant", "content": begun}]
    args = {"continue_final_message": True}
    prompt = template_of(folder).render(chat, args)
    assert prompt == _theirs(folder, chat, add_generation_prompt=False, **args)
    assert prompt.rstrip().endswith(begun.strip())
    chat[1]["content"] = [{"type": "text", "text": begun}]
    assert template_of(folder).render(chat, args) == prompt


def test_tools_same_as_transformers(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, QWEN3)
    prompt = template_of(folder).render(TOOL_CHAT, {"tools": TOOLS})
    assert prompt == _theirs(folder, TOOL_CHAT, tools=TOOLS)
    assert "é <&> 'q'" in prompt  # no HTML escapes


def test_arguments_of_calls_may_be_json_text(tmp_path: Path) -> None:
    """OpenAI's clients send back a call's arguments as the string that they were given."""
    template = template_of(folder_with(tmp_path, QWEN3))
    as_text = {"name": "f", "arguments": json.dumps(CALL["arguments"])}
    chat = [USER, {**TOOL_CHAT[1], "tool_calls": [{"type": "function", "function": as_text}]}]
    assert template.render(chat) == template.render(TOOL_CHAT[:2])
    assert "5" not in template.render([{**ASSISTANT, "tool_calls": []}])
    with pytest.raises(InvalidRequest, match="TypeError"):
        template.render([{**ASSISTANT, "tool_calls": 5}])
    for arguments in ('{"a": ', "[" * 100_000):
        broken = {"name": "f", "arguments": arguments}
        chat = [USER, {**TOOL_CHAT[1], "tool_calls": [{"type": "function", "function": broken}]}]
        assert f'"arguments": {arguments}}}' in template.render(chat)


def test_named_templates(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "D{{ messages[0].content }}"},
        {"name": "tool_use", "template": "T{{ messages[0].content }}"},
    ]
    folder = folder_with(tmp_path, named)
    template = template_of(folder)
    chat = [{"role": "user", "content": "x"}]
    assert template.render(chat) == _theirs(folder, chat) == "Dx"
    assert template.render(chat, {"tools": TOOLS}) == _theirs(folder, chat, tools=TOOLS) == "Tx"


def test_where_the_template_is_found(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "config")
    assert template_of(folder).render([USER]) == "config"
    (folder / "chat_template.json").write_text('{"chat_template": "json"}')
    assert template_of(folder).render([USER]) == _theirs(folder, [USER]) == "config"
    (folder / "chat_template.jinja").write_text("jinja")
    assert template_of(folder).render([USER]) == "jinja"
    folder = make(tmp_path / "other", "byte_level")
    (folder / "chat_template.json").write_text('{"chat_template": "json"}')
    assert template_of(folder).render([USER]) == "json"


def test_text_parts_are_joined(tmp_path: Path) -> None:
    template = template_of(folder_with(tmp_path, CHATML))
    parts = [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]
    assert template.render([{"role": "user", "content": parts}]) == template.render(
        [{"role": "user", "content": "Hi there"}]
    )


def test_templates_know_a_developer_as_system(tmp_path: Path) -> None:
    template = template_of(folder_with(tmp_path, CHATML))
    developer, system = ({"role": role, "content": "Hi"} for role in ("developer", "system"))
    assert template.render([developer, USER]) == template.render([system, USER])


HARMONY = """
{%- macro spoken(role, channel, text) -%}
<|start|>{{ role }}<|channel|>{{ channel }}<|message|>{{ text }}<|end|>
{%- endmacro -%}
{%- set state = namespace(name=none) -%}
{{- "<|start|>system<|message|>" + strftime_now("%Y") + " " + (reasoning_effort or "medium") }}
{%- for message in messages -%}
    {%- if message.role == "assistant" and message.tool_calls -%}
        {%- if message.content and message.thinking -%}
            {{- raise_exception("content or thinking, not both") }}
        {%- endif -%}
        {{- spoken("assistant", "analysis", message.content or message.thinking) }}
        {%- set state.name = message.tool_calls[0].function.name -%}
        {{- "<|start|>assistant to=functions." + state.name + "<|message|>" }}
        {{- message.tool_calls[0].function.arguments | tojson + "<|call|>" }}
    {%- elif message.role == "tool" -%}
        {{- spoken("functions." + state.name, "commentary", message.content | tojson) }}
    {%- else -%}
        {{- spoken(message.role, "final", message.content) }}
    {%- endif -%}
{%- endfor -%}
"""


@pytest.mark.parametrize("content", [None, "Let me look."])
def test_reasoning_of_a_call_is_thinking_where_the_template_says_so(content: str | None) -> None:
    """What gpt-oss's template is made of: macros, a namespace, thinking of calls of tools."""
    call = {"type": "function", "function": {"name": "time", "arguments": '{"zone": "UTC"}'}}
    messages = [
        {"role": "user", "content": "What time is it?"},
        {
            "role": "assistant",
            "content": content,
            "reasoning_content": "I need a clock.",
            "tool_calls": [{"id": "1", **call}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "12:00"},
    ]
    prompt = ChatTemplate({"default": HARMONY}, {}).render(messages, {"reasoning_effort": "low"})
    _, spoken = prompt.split(" low", 1)
    assert spoken == (
        "<|start|>user<|channel|>final<|message|>What time is it?<|end|>"
        f"<|start|>assistant<|channel|>analysis<|message|>{content or 'I need a clock.'}<|end|>"
        '<|start|>assistant to=functions.time<|message|>{"zone": "UTC"}<|call|>'
        '<|start|>functions.time<|channel|>commentary<|message|>"12:00"<|end|>'
    )
