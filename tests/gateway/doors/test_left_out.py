"""Parts of requests that agents send to every model are left out, with a warning.

The requests are those of Codex for a model that it knows, and of Claude Code; the chat template of
the served model does not support reasoning.
"""

from __future__ import annotations

import logging
from typing import Any

import anthropic
import httpx
import openai
import pytest

from helpers.scripted_server import MODEL, ScriptedServer
from minisgl.message import ChatPrompt
from minisgl.server.api.left_out import Omission, OmissionLog
from minisgl_gateway.pictures import UNREADABLE

WARNING = "x-minisgl-warning"
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}


def prompt_of(server: ScriptedServer) -> ChatPrompt:
    prompt = server.received[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


@pytest.fixture
def claude(server: ScriptedServer) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


def test_codex_with_a_model_that_it_knows(client: openai.OpenAI, server: ScriptedServer) -> None:
    fields: dict[str, Any] = {
        "input": [
            {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "gAAAA"},
            {"type": "web_search_call", "id": "w", "status": "completed", "action": {"query": "a"}},
            {"type": "function_call", "call_id": "c", "name": "view", "arguments": "{}"},
            {
                "type": "function_call_output",
                "call_id": "c",
                "output": [
                    {"type": "input_text", "text": "see "},
                    {"type": "input_image", "image_url": "data:image/png;base64,x"},
                ],
            },
            {"role": "user", "content": "so?"},
        ],
        "tools": [
            {"type": "function", "name": "f", "parameters": {"type": "object"}},
            {"type": "tool_search", "execution": "client", "parameters": {}},
            {"type": "web_search\r\nevil: é", "external_web_access": True},
        ],
        "include": ["reasoning.encrypted_content", "web_search_call.action.sources"],
        "reasoning": {"effort": "medium", "summary": "auto"},
        "text": {"verbosity": "low"},
        "truncation": "auto",
        "service_tier": "priority",
        "prompt_cache_retention": "24h",
        "max_tool_calls": 9,
        "store": False,
    }
    raw = client.responses.with_raw_response.create(model=MODEL, extra_body=fields)
    assert raw.headers[WARNING] == (
        "left out: tools[1] (tool_search), tools[2] (web_search), input[0] (encrypted reasoning), "
        "input[1] (web_search_call), input[3].output[1] (input_image), text.verbosity, "
        "truncation, reasoning.effort"
    )
    prompt = prompt_of(server)
    assert [tool["function"]["name"] for tool in prompt.tools] == ["f"]
    assert [turn["role"] for turn in prompt.messages] == ["assistant", "tool", "user"]
    assert prompt.messages[1]["content"] == f"see {UNREADABLE}"
    assert prompt.template_args == {}


def test_claude_code(claude: anthropic.Anthropic, server: ScriptedServer) -> None:
    tool: Any = {"name": "f", "description": "d", "input_schema": {"type": "object"}}
    fields: dict[str, Any] = {
        "messages": [
            {
                "role": "assistant",
                "content": [
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "tool_use", "id": "t", "name": "f", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "t",
                        "content": [{"type": "text", "text": "see"}, IMAGE],
                    }
                ],
            },
        ],
        "tools": [
            {**tool, "defer_loading": True, "input_examples": [{"a": 1}]},
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
        ],
        "thinking": {"type": "enabled", "budget_tokens": 31999},
        "output_config": {"effort": "medium"},
        "service_tier": "standard_only",
    }
    raw = claude.messages.with_raw_response.create(
        model=MODEL, max_tokens=9, messages=[], extra_body=fields
    )
    assert raw.headers[WARNING] == (
        "left out: tools[1] (web_search), messages[0].content[0] (redacted_thinking), "
        "messages[1].content[0].content[1] (image), output_config.effort, thinking.budget_tokens"
    )
    prompt = prompt_of(server)
    function = {"name": "f", "parameters": {"type": "object"}}
    function["description"] = 'd\nExample of its input: {"a":1}'
    assert prompt.tools == [{"type": "function", "function": function}]
    assert prompt.messages[1]["content"] == f"see\n{UNREADABLE}"
    assert prompt.thinking_budget is None
    plain: Any = {"messages": [{"role": "user", "content": "a"}], "model": MODEL, "max_tokens": 9}
    default = claude.messages.with_raw_response.create(
        **plain, output_config={"effort": "high"}
    )  # which Claude Code always sends
    assert WARNING not in default.headers
    assert prompt_of(server).template_args == {}
    count = claude.messages.count_tokens(model=MODEL, messages=plain["messages"], tools=[tool])
    assert count.input_tokens
    search: Any = {"type": "web_search_20250305", "name": "web_search"}
    claude.messages.create(
        **plain, tools=[search], tool_choice={"type": "tool", "name": "web_search"}
    )
    assert prompt_of(server).tool_choice == "web_search"  # which the tokenizer refuses: no tool


def test_hosted_tools_of_earlier_turns(claude: anthropic.Anthropic, server: ScriptedServer) -> None:
    """A conversation that began with Claude continues here."""
    cited = {"type": "web_search_result_location", "cited_text": "c", "url": "u", "title": "t"}
    blocks: Any = [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
        {"type": "text", "text": "Found.", "citations": [{**cited, "encrypted_index": "e"}]},
    ]
    raw = claude.messages.with_raw_response.create(
        model=MODEL,
        max_tokens=9,
        messages=[
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": blocks},
            {"role": "user", "content": "b"},
        ],
    )
    assert raw.headers[WARNING] == (
        "left out: messages[1].content[0] (server_tool_use), "
        "messages[1].content[1] (web_search_tool_result)"
    )
    assert [turn["content"] for turn in prompt_of(server).messages] == ["a", "Found.", "b"]


def test_the_log_names_each_kind_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("minisgl"), "propagate", True)
    caplog.set_level(logging.WARNING)
    log = OmissionLog()
    many = [Omission(f"tools[{index}]", "web_search") for index in range(30)]
    header = log.warning(many)
    assert header.endswith("tools[19] (web_search), 10 more")
    log.warning([*many, Omission("text.verbosity", "text.verbosity")])
    log.warning(many)
    assert log.warning([]) == ""
    named = [message.partition("cannot use it: ")[2] for message in caplog.messages]
    assert named == [
        "web_search; this is logged once",
        "text.verbosity; this is logged once",
    ]


@pytest.mark.parametrize(
    ("template", "asks", "is_named"),
    [
        ("{{ messages }}", True, True),
        ("{{ messages }}", False, False),  # such a model never reasons
        ("<think></think>", False, True),
        ("<think></think>", True, False),  # such a model always reasons
        ("{% if enable_thinking %}<think></think>{% endif %}", False, False),
    ],
)
def test_a_switch_of_reasoning_that_has_no_effect(
    server: ScriptedServer, http: httpx.Client, template: str, asks: bool, is_named: bool
) -> None:
    messages = [{"role": "user", "content": "one"}]
    chat: dict[str, Any] = {"messages": messages}
    kind = {"type": "enabled" if asks else "disabled"}
    with server.templated(template):
        for path, body in (
            ("/v1/chat/completions", chat | {"enable_thinking": asks}),
            ("/v1/chat/completions", chat | {"thinking": kind}),
            (
                "/v1/chat/completions",
                chat | {"chat_template_kwargs": {"enable_thinking": asks}, "stream": True},
            ),
            ("/api/chat", chat | {"model": MODEL, "think": asks}),
            ("/api/generate", {"model": MODEL, "prompt": "one", "think": asks}),
        ):
            answer = http.post(path, json=body)
            assert answer.status_code == 200, answer.text
            found = answer.headers.get(WARNING)
            name = "think" if path.startswith("/api/") else "enable_thinking"
            assert found == (f"left out: {name}" if is_named else None)
            assert prompt_of(server).template_args == {"enable_thinking": asks}
