"""Every field of OpenAI's schemas, and of other engines', is honoured, neutral or refused."""

from __future__ import annotations

from typing import Any, get_args

import httpx
import pytest
from openai.types import completion_create_params as text_params
from openai.types.chat import completion_create_params as chat_params

from helpers.api_requests import CHAT, TEXT, hello, refused
from helpers.scripted_server import ScriptedServer
from minisgl.message import ChatPrompt

HONOURED = {
    "model",
    "messages",
    "prompt",
    "temperature",
    "top_p",
    "seed",
    "stop",
    "max_tokens",
    "max_completion_tokens",
    "stream",
    "stream_options",
}


CHANGES_NOTHING = {
    "user": "u",
    "metadata": {"a": "b"},
    "safety_identifier": "s",
    "prompt_cache_key": "k",
    "parallel_tool_calls": True,
    "prediction": {"type": "content", "content": "a"},
    "prompt_cache_retention": "24h",
    "service_tier": "flex",
}


# field: (values that change nothing, values that are refused)
NEUTRAL: dict[str, tuple[list[Any], list[Any]]] = {
    "audio": ([None], [{"voice": "alloy", "format": "mp3"}]),
    "best_of": ([None, 1], [2, 0]),
    "echo": ([None, False, True], [1]),
    "frequency_penalty": ([None, 0, 0.0, 0.5, -1], [2.5, -3]),
    "function_call": (["none", "auto"], [{"name": "f"}]),
    "functions": ([[]], [[{"name": "f"}]]),
    "logit_bias": ([None, {}, {"50256": -100}], [{"5": 101}, {"a": 1}, {"-1": 1}]),
    "modalities": ([None, ["text"]], [["text", "audio"]]),
    "moderation": ([None], [{"model": "m"}]),
    "n": ([None, 1, 2], [0, -1, 129]),
    "presence_penalty": ([None, 0, 0.5], [-2.5]),
    "prompt_cache_options": ([None, {"mode": "implicit"}], [{"mode": "explicit"}]),
    "reasoning_effort": ([None, "low", "none"], [1]),
    "response_format": ([None, {"type": "text"}, {"type": "json_object"}], ["json"]),
    "store": ([None, False], [True]),
    "suffix": ([None, ""], ["the end"]),
    "tool_choice": (
        ["none", "auto", "required", {"type": "function", "function": {"name": "f"}}],
        [1],
    ),
    "tools": ([[], [{"type": "function", "function": {"name": "f"}}]], [1]),
    "top_logprobs": ([None, 0], [3, 21, -1]),
    "verbosity": ([None, "medium"], ["low"]),
    "web_search_options": ([None], [{}]),
}


# Extensions that clients of other engines send, likewise.
EXTENSIONS: dict[str, tuple[list[Any], list[Any]]] = {
    "repetition_penalty": ([None, 1, 1.0, 1.1], [0, -1, 11]),
    "length_penalty": ([None, 1.0], [0.5]),
    "use_beam_search": ([None, False], [True]),
    "min_tokens": ([None, 0, 3], [-1]),
    "bad_words": ([None, [], ["no"]], [[""], ["x" * 257], ["a"] * 257, "no"]),
    "allowed_token_ids": ([None, [1]], [[]]),
    "prompt_logprobs": ([None], [-1, 21]),
    "include_stop_str_in_output": ([None, False], [1]),
    "return_token_ids": ([None, False], [1]),
    "return_tokens_as_token_ids": ([None, False], [True]),
    "top_k": ([None, -1, 0], [-2]),
    "truncate_prompt_tokens": ([None, 5], [0]),
    "spaces_between_special_tokens": ([None, True], [False]),
}


CHAT_EXTENSIONS: dict[str, tuple[list[Any], list[Any]]] = {
    "add_generation_prompt": ([None, True, False], [1]),
    "continue_final_message": ([None, False, True], [1]),
    "add_special_tokens": ([None, False], [True]),
    "separate_reasoning": ([None, True], [False]),
    "stream_reasoning": ([None, True], [False]),
    "include_reasoning": ([None, True], [False]),
    "thinking": ([None, {"type": "enabled"}], [True]),
    "echo": ([None, False], [True]),
}
TEXT_EXTENSIONS: dict[str, tuple[list[Any], list[Any]]] = {
    "add_special_tokens": ([None, True, False], [1]),
}
LOGPROBS: dict[str, tuple[list[Any], list[Any]]] = {
    CHAT: ([None, False, True], [5]),
    TEXT: ([None, 0, 5], [21, -1]),
}


def fields_of(params: Any) -> list[str]:
    kinds = get_args(params.CompletionCreateParams)
    return sorted({name for kind in kinds for name in kind.__annotations__})


@pytest.mark.parametrize(
    ("path", "field"),
    [(CHAT, name) for name in fields_of(chat_params)]
    + [(TEXT, name) for name in fields_of(text_params)],
)
def test_no_openai_field_is_dropped_in_silence(http: httpx.Client, path: str, field: str) -> None:
    if field in HONOURED:
        return  # test_api_openai.py and test_api_details.py show how
    base = hello() if path == CHAT else {"prompt": "hello"}
    neutral, others = NEUTRAL.get(field, ([], []))
    if field == "logprobs":
        neutral, others = LOGPROBS[path]
    if field in CHANGES_NOTHING:
        neutral = [CHANGES_NOTHING[field]]
    assert neutral, f"OpenAI's schema has a field that no test knows: {field}"
    for value in neutral:
        assert http.post(path, json=base | {field: value}).status_code == 200
    for value in others:
        error = refused(http.post(path, json=base | {field: value}))
        assert error["param"] == field
        assert field in error["message"]


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_extensions_are_neutral_or_refused(http: httpx.Client, path: str) -> None:
    base = hello() if path == CHAT else {"prompt": "hello"}
    extensions = EXTENSIONS | (CHAT_EXTENSIONS if path == CHAT else TEXT_EXTENSIONS)
    for field, (neutral, others) in extensions.items():
        for value in neutral:
            assert http.post(path, json=base | {field: value}).status_code == 200, field
        for value in others:
            assert refused(http.post(path, json=base | {field: value}))["param"] == field


def test_tools_that_must_not_be_called_stay_out_of_the_prompt(
    http: httpx.Client, server: ScriptedServer
) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert http.post(CHAT, json=hello(tools=tools, tool_choice="none")).status_code == 200
    prompt = server.received[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.template_args == {}
    assert prompt.tools == []
    assert http.post(CHAT, json=hello(tools=tools)).status_code == 200
    prompt = server.received[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    assert [tool["function"]["name"] for tool in prompt.tools] == ["f"]


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_of_an_assistant_reaches_the_template(
    http: httpx.Client, server: ScriptedServer, name: str
) -> None:
    part = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": "user", "content": [part]},
        {"role": "assistant", "content": "4", name: "2 + 2"},
        {"role": "user", "content": "hello"},
    ]
    assert http.post(CHAT, json={"messages": messages}).status_code == 200
    prompt = server.received[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages[1] == {
        "role": "assistant",
        "content": "4",
        "reasoning_content": "2 + 2",
    }


def test_neutral_values_are_compared_with_their_json_type(http: httpx.Client) -> None:
    assert refused(http.post(CHAT, json=hello(n=True)))["param"] == "n"
    assert refused(http.post(CHAT, json=hello(store=0)))["param"] == "store"
    assert refused(http.post(TEXT, json={"prompt": "a", "logprobs": False}))["param"] == "logprobs"
