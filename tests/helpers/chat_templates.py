"""Chat templates of four families, written out, and conversations for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from helpers.text_checkpoints import make
from minisgl.tokenizer import load_tokenizer
from minisgl.tokenizer.template import ChatTemplate, find_sources

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


def folder_with(tmp_path: Path, template: Any) -> Path:
    return make(tmp_path, "byte_level", config={"chat_template": template})


def template_of(folder: Path) -> ChatTemplate:
    return ChatTemplate(find_sources(folder), load_tokenizer(folder).special_tokens)
