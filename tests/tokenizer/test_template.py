"""The same prompt as transformers' apply_chat_template, and refusals that a client can read."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.text_checkpoints import make
from minisgl.errors import CheckpointError, InvalidRequest
from minisgl.tokenizer import load_tokenizer, sandbox
from minisgl.tokenizer.template import ChatTemplate, load_template

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content']"
    " + '<|im_end|>' + '\\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

LLAMA3 = """
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%Y") %}
{%- endif %}
{{- bos_token }}
{%- for message in messages if message.role != "hidden" %}
    {%- set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'
        + message['content'] | trim + '<|eot_id|>' %}
    {%- if loop.index0 == 0 %}
{{- "Year: " + date_string + "\n" }}
    {%- endif %}
    {{- content }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""

MISTRAL = """
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
    {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
        {{- raise_exception("Conversation roles must alternate user/assistant/...") }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\n\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- else %}
        {%- generation %}
        {{- " " + message["content"] + eos_token }}
        {%- endgeneration %}
    {%- endif %}
{%- endfor %}
"""

QWEN3 = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role + '\\n' + content.split('</think>')[-1].lstrip('\\n') }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- set call = tool_call.function if tool_call.function else tool_call %}
            {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content }}
        {{- '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL, "qwen3": QWEN3}

USER = {"role": "user", "content": " Hi <b>& 'you' 😀\n"}
SYSTEM = {"role": "system", "content": "Be kind."}
ASSISTANT = {"role": "assistant", "content": "<think>x</think>\n\nHello."}
CALL = {"name": "f", "arguments": {"a": "é<", "b": [1, None]}}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [USER],
    "system": [SYSTEM, USER],
    "turns": [SYSTEM, USER, ASSISTANT, USER],
    "null fields": [{**USER, "name": None}, {**ASSISTANT, "tool_calls": None}, USER],
}
TOOL_CHAT: list[dict[str, Any]] = [
    USER,
    {"role": "assistant", "tool_calls": [{"type": "function", "function": CALL}]},
    {"role": "tool", "content": "42"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "é <&> 'q'"}}]


def _folder(tmp_path: Path, template: Any) -> Path:
    return make(tmp_path, "byte_level", config={"chat_template": template})


def _ours(folder: Path) -> ChatTemplate:
    return load_template(folder, load_tokenizer(folder).special_tokens)


def _theirs(folder: Path, messages: list[dict[str, Any]], **args: Any) -> str:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder))
    args = {"add_generation_prompt": True, **args}
    text = tokenizer.apply_chat_template(messages, tokenize=False, **args)
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("name", TEMPLATES)
def test_same_as_transformers(name: str, tmp_path: Path) -> None:
    folder = _folder(tmp_path, TEMPLATES[name])
    template = _ours(folder)
    for chat in CHATS.values():
        assert template.render(chat) == _theirs(folder, chat)
    for args in ({"add_generation_prompt": False}, {"enable_thinking": False}):
        assert template.render([USER], args) == _theirs(folder, [USER], **args)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("begun", ["It is 4", "It is ", " so\n", "4 4"])
def test_a_final_message_is_continued_as_transformers_does(
    name: str, begun: str, tmp_path: Path
) -> None:
    folder = _folder(tmp_path, TEMPLATES[name])
    chat = [USER, {"role": "assistant", "content": begun}]
    args = {"continue_final_message": True}
    prompt = _ours(folder).render(chat, args)
    assert prompt == _theirs(folder, chat, add_generation_prompt=False, **args)
    assert prompt.rstrip().endswith(begun.strip())
    chat[1]["content"] = [{"type": "text", "text": begun}]
    assert _ours(folder).render(chat, args) == prompt


def test_a_message_that_cannot_be_continued_is_refused() -> None:
    args = {"continue_final_message": True}
    calls = {"role": "assistant", "tool_calls": [{"type": "function", "function": CALL}]}
    for last, match in (
        (USER, "the role 'user'"),
        ({"role": "assistant", "content": ""}, "no content"),
        (calls, "no content"),
        (calls | {"content": "x"}, "tool calls"),
    ):
        with pytest.raises(InvalidRequest, match=match) as caught:
            ChatTemplate({"default": CHATML}, {}).render([USER, last], args)
        assert caught.value.param == "continue_final_message"
    with pytest.raises(InvalidRequest, match="does not write"):
        ChatTemplate({"default": "x"}, {}).render([{"role": "assistant", "content": "x"}], args)


def test_tools_same_as_transformers(tmp_path: Path) -> None:
    folder = _folder(tmp_path, QWEN3)
    prompt = _ours(folder).render(TOOL_CHAT, {"tools": TOOLS})
    assert prompt == _theirs(folder, TOOL_CHAT, tools=TOOLS)
    assert "é <&> 'q'" in prompt  # no HTML escapes


def test_arguments_of_calls_may_be_json_text(tmp_path: Path) -> None:
    """OpenAI's clients send back a call's arguments as the string that they were given."""
    template = _ours(_folder(tmp_path, QWEN3))
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
    folder = _folder(tmp_path, named)
    template = _ours(folder)
    chat = [{"role": "user", "content": "x"}]
    assert template.render(chat) == _theirs(folder, chat) == "Dx"
    assert template.render(chat, {"tools": TOOLS}) == _theirs(folder, chat, tools=TOOLS) == "Tx"


def test_where_the_template_is_found(tmp_path: Path) -> None:
    folder = _folder(tmp_path, "config")
    assert _ours(folder).render([USER]) == "config"
    (folder / "chat_template.json").write_text('{"chat_template": "json"}')
    assert _ours(folder).render([USER]) == _theirs(folder, [USER]) == "config"
    (folder / "chat_template.jinja").write_text("jinja")
    assert _ours(folder).render([USER]) == "jinja"
    folder = make(tmp_path / "other", "byte_level")
    (folder / "chat_template.json").write_text('{"chat_template": "json"}')
    assert _ours(folder).render([USER]) == "json"


def test_text_parts_are_joined(tmp_path: Path) -> None:
    template = _ours(_folder(tmp_path, CHATML))
    parts = [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]
    assert template.render([{"role": "user", "content": parts}]) == template.render(
        [{"role": "user", "content": "Hi there"}]
    )


def test_templates_know_a_developer_as_system(tmp_path: Path) -> None:
    template = _ours(_folder(tmp_path, CHATML))
    developer, system = ({"role": role, "content": "Hi"} for role in ("developer", "system"))
    assert template.render([developer, USER]) == template.render([system, USER])


@pytest.mark.parametrize(
    ("messages", "match", "param"),
    [
        ([], "at least one message", "messages"),
        ([{"content": "x"}], "role must be a string", "messages[0].role"),
        ([USER, {"role": "user"}], "content is missing", "messages[1].content"),
        ([{"role": "user", "content": 5}], "got a int", "messages[0].content"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "text only, got 'image_url'",
            "messages[0].content[0]",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "got 'text'", "messages[0].content[0]"),
        ([{"role": "user", "content": ["x"]}], "got 'x'", "messages[0].content[0]"),
    ],
)
def test_malformed_messages(messages: Any, match: str, param: str) -> None:
    template = ChatTemplate({"default": CHATML}, {})
    with pytest.raises(InvalidRequest, match=match) as caught:
        template.render(messages)
    assert caught.value.param == param
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("source", "match"),
    [
        (MISTRAL, "roles must alternate"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
        ("{{ nothing.at.all }}", "'nothing' is undefined"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ raise_exception(messages[0].tool_calls[0].function.arguments) }}", r"\\ud800"),
    ],
)
def test_templates_that_refuse(source: str, match: str) -> None:
    call = {"function": {"name": "f", "arguments": '"\\ud800"'}}
    chat = [{"role": "assistant", "content": "x", "tool_calls": [call]}]
    with pytest.raises(InvalidRequest, match=match) as caught:
        ChatTemplate({"default": source}, {}).render(chat)
    caught.value.message.encode()


@pytest.mark.parametrize("template", [5, {"a": "b"}, ["x"], [{"name": "default"}]])
def test_no_template_at_all(template: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="must be a string or a list"):
        _ours(_folder(tmp_path, template))


def test_a_template_that_is_no_text(tmp_path: Path) -> None:
    folder = make(tmp_path, "byte_level")
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja cannot be read as text"):
        _ours(folder)
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_bytes(b"[" * 100_000)
    with pytest.raises(CheckpointError, match=r"chat_template\.json is not valid JSON"):
        _ours(folder)


def test_checkpoints_that_cannot_chat(tmp_path: Path) -> None:
    none = _ours(make(tmp_path, "byte_level"))
    broken = ChatTemplate({"default": "{% if %}"}, {})
    too_deep = ChatTemplate({"default": "{{ " + "(" * 10_000}, {})
    for template in (none, broken, too_deep):
        assert not template.is_usable
        with pytest.raises(InvalidRequest, match="/v1/completions"):
            template.render([USER])


@pytest.mark.parametrize(
    ("source", "match"),
    [
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "more than",
        ),
        (
            "{% macro f() %}{% for i in range(9) %}{{ f() }}{% endfor %}{% endmacro %}{{ f() }}",
            "recursion",
        ),
        ("{{ 'x' * 10 ** 9 }}", "far too large"),
        ("{{ 'x' * 999999999 }}", "far too large"),
        ("{{ [1, 2] * 999999999 }}", "far too large"),
        ("{{ 10 ** 10 ** 10 }}", "far too large"),
        ("{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}", "exceeds"),
        ("{{ ('%999999999d' % 1)|length }}", "far too large"),
        ("{{ ('%(a(b))999999999d' % {'a(b)': 1})|length }}", "far too large"),
        ("{{ ('%.999999999f' % 1.5)|length }}", "far too large"),
        ("{{ ('%*d' % (999999999, 1))|length }}", "far too large"),
        ("{{ ('%999999s%999999s' % (1, 1))|length }}", "far too large"),
        ("{{ '%999999999s'|format(1)|length }}", "far too large"),
        ("{{ '%999999999s'|safe|format(1)|length }}", "far too large"),
        ("{{ '{:>999999999}'.format(1)|length }}", "far too large"),
        ("{{ '{:>{}}'.format(1, 999999999)|length }}", "far too large"),
        ("{{ '{a:>{b}}'.format_map({'a': 1, 'b': '999999999'})|length }}", "far too large"),
        ("{{ 'x'.ljust(999999999)|length }}", "far too large"),
        ("{{ 'x'|center(width=999999999)|length }}", "far too large"),
        ("{{ 'x'|indent(999999999, true)|length }}", "far too large"),
        ("{{ [1]|slice(999999999)|list|length }}", "far too large"),
        ("{{ lipsum(n=999999999)|length }}", "undefined"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages.__class__() }}", "unsafe"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
    ],
)
def test_a_template_has_bounds_of_time_and_size(
    source: str, match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "MAX_TEMPLATE_S", 5.0 if match == "recursion" else 0.2)
    monkeypatch.setattr(sandbox, "MAX_PROMPT", 10**6)
    chat = ChatTemplate({"default": source}, {})
    with pytest.raises(InvalidRequest, match=match):
        chat.render([{"role": "user", "content": "a"}])


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not bound memory")
@pytest.mark.parametrize(
    "body",
    ["{% set ns.s = ns.s ~ ns.s %}", "{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}",
     "{% set ns.s = [ns.s, ns.s]|join %}", "{% set ns.s = ns.s.replace('a', ns.s[:99]) %}"],
)  # fmt: skip
def test_a_text_that_a_loop_doubles_ends_at_a_bound(
    body: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "MAX_MEMORY", 2**28)
    source = "{% set ns = namespace(s='aa') %}{% for i in range(60) %}" + body + "{% endfor %}"
    chat = ChatTemplate({"default": source}, {})
    chat.is_alone = True
    before = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(InvalidRequest, match="more than 268,435,456 bytes"):
        chat.render([{"role": "user", "content": "a"}])
    assert resource.getrlimit(resource.RLIMIT_AS) == before


def test_products_that_templates_write() -> None:
    source = "{{ '-' * 3 }}{{ 2 * 3 }}{{ 1.5 * 2 }}{{ 2 ** 10 }}{{ messages|length * 2 }}"
    chat = ChatTemplate({"default": source}, {})
    assert chat.render([{"role": "user", "content": "a"}]) == "---63.010242"


def test_formats_that_templates_write() -> None:
    source = (
        "{{ '%s is %05.1f%%' % ('it', 2.25) }} {{ 7 % 4 }} {{ '%(a)-3s|'|format(a=1) }} "
        "{{ '{:>4}'.format(1) }} {{ '{:>{}}'.format(1, 3) }} {{ 'x'.rjust(2) }} "
        "{{ 'x'|center(3) }} {{ 'id 1234567890 on 20260101: %s' % 1 }} {{ '%d' % 1234567890 }}"
    )
    chat = ChatTemplate({"default": source}, {})
    assert chat.render([{"role": "user", "content": "a"}]) == (
        "it is 002.2% 3 1  |    1   1  x  x  id 1234567890 on 20260101: 1 1234567890"
    )


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
