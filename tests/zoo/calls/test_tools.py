"""Tools and reasoning over HTTP: the answer's form, and calls that a real server must make."""

from __future__ import annotations

import json
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from helpers.chat_answers import shown, summed
from helpers.running_server import RunningServer
from helpers.scripted_server import MODEL, ScriptedServer
from minisgl.message import ChatPrompt

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "d", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
PARTS = (
    "!part:reasoning:Hm, !part:reasoning:yes. !part:content:Wait. !part:call:weather "
    '!part:arguments:{"city": !part:arguments:"a"} !part:call:now !part:arguments:{}'
)


def test_the_parts_of_an_answer(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": [{"role": "user", "content": PARTS}], "tools": TOOLS}
    answer = client.chat.completions.create(**asked)
    assert shown(answer) == {
        "content": "Wait.",
        "reasoning_content": "Hm,yes.",
        "calls": [["weather", '{"city":"a"}'], ["now", "{}"]],
        "finish_reason": "tool_calls",
    }
    assert answer.usage
    assert answer.usage.completion_tokens_details
    assert answer.usage.completion_tokens_details.reasoning_tokens == 2
    ids = [call.id for call in answer.choices[0].message.tool_calls or ()]
    assert len({*ids}) == 2
    assert all(len(id) == 9 and id.isalnum() for id in ids)
    assert summed(client.chat.completions.create(**asked, stream=True)) == shown(answer)


def test_content_is_null_beside_calls(http: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "!part:call:now !part:arguments:{}"}]}
    message = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    assert message["content"] is None
    assert "reasoning_content" not in message


@pytest.mark.parametrize(
    ("choice", "expected"),
    [(None, "auto"), ("auto", "auto"), ("required", "required"),
     ({"type": "function", "function": {"name": "now"}}, "now")],
)  # fmt: skip
def test_the_prompt_has_the_tools(
    choice: Any, expected: str, server: ScriptedServer, http: httpx.Client
) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "tools": TOOLS, "tool_choice": choice,
            "parallel_tool_calls": False, "reasoning_effort": "low", "enable_thinking": True,
            "thinking_budget": 7}  # fmt: skip
    assert http.post("/v1/chat/completions", json=body).status_code == 200
    prompt = server.received[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.tool_choice == expected
    assert prompt.parallel_tool_calls is False
    assert prompt.thinking_budget == 7
    assert prompt.template_args == {"reasoning_effort": "low", "enable_thinking": True}
    assert prompt.tools[0] == TOOLS[0]
    assert prompt.tools[1]["function"]["parameters"] == {"type": "object", "properties": {}}


def test_allowed_tools(client: openai.OpenAI, server: ScriptedServer) -> None:
    """The prompt offers only the allowed tools. An answer may or must call one of them."""
    named = {"type": "function", "function": {"name": "now"}}
    for mode in ("auto", "required"):
        allowed: Any = {"mode": mode, "tools": [named]}
        client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "a"}],
            tools=TOOLS,
            tool_choice={"type": "allowed_tools", "allowed_tools": allowed},
        )
        chat = server.received[-1].prompt
        choice: Any = {
            "type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "now"}],
        }  # fmt: skip
        tools: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
        client.responses.create(model=MODEL, input="a", tools=tools, tool_choice=choice)
        response = server.received[-1].prompt
        for prompt in (chat, response):
            assert isinstance(prompt, ChatPrompt)
            assert [tool["function"]["name"] for tool in prompt.tools] == ["now"]
            assert prompt.tool_choice == mode


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"thinking_budget": -1}, "thinking_budget"),
        ({"functions": [{"name": "f"}]}, "functions"),
    ],
)
def test_wrong_tools(fields: dict[str, Any], param: str, http: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], **fields}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_a_real_server_makes_the_calls(builtin: RunningServer) -> None:
    with builtin.client() as client:
        asked: Any = {
            "model": "minisgl-builtin",
            "messages": [{"role": "user", "content": "Weather in Rome for 2 days?"}],
            "tools": TOOLS,
            "max_tokens": 300,
            "seed": 1,
        }
        named = {"type": "function", "function": {"name": "weather"}}
        for choice in ("required", named):
            for parallel in (True, False):
                wish = {"tool_choice": choice, "parallel_tool_calls": parallel}
                answer = client.chat.completions.create(**asked, **wish)
                message = shown(answer)
                if message["finish_reason"] == "length":  # a small model may call for ever
                    assert choice == "required"
                    assert parallel
                    message["calls"].pop()
                else:
                    assert message["finish_reason"] == "tool_calls"
                    assert message["content"] == ""
                assert len(message["calls"]) == 1 or (choice == "required" and parallel)
                for name, arguments in message["calls"]:
                    jsonschema.validate(json.loads(arguments), SCHEMA if name == "weather" else {})
                stream = client.chat.completions.create(**asked, **wish, stream=True)
                streamed = summed(stream)
                assert streamed["calls"][: len(message["calls"])] == message["calls"]
        other = {"type": "function", "function": {"name": "other"}}
        with pytest.raises(openai.BadRequestError, match="no tool has that name"):
            client.chat.completions.create(**asked, tool_choice=other)
        follow_up = [
            *asked["messages"],
            answer.choices[0].message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": "x", "content": "sunny"},
        ]
        again = client.chat.completions.create(**{**asked, "messages": follow_up})
        assert again.choices[0].finish_reason in ("stop", "length", "tool_calls")
