"""Forms that clients of other servers send, and what then reaches the tokenizer."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from helpers.scripted_server import MODEL, ScriptedServer
from minisgl.message import ChatPrompt, TextPrompt
from minisgl_zoo.calls.known import detect_switch

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def sent(http: httpx.Client, server: ScriptedServer, path: str, **fields: Any) -> Any:
    base: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
    answer = http.post(path, json=(base if path == CHAT else {"prompt": "a"}) | fields)
    assert answer.status_code == 200, answer.text
    return server.received[-1]


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_top_k_of_all_tokens(http: httpx.Client, server: ScriptedServer, path: str) -> None:
    assert sent(http, server, path, top_k=-1).sampling.top_k == 0


def test_a_rendered_prompt_gets_no_special_tokens(
    http: httpx.Client, server: ScriptedServer
) -> None:
    assert sent(http, server, TEXT, add_special_tokens=False).prompt == TextPrompt(
        text="a", add_special_tokens=False
    )
    assert sent(http, server, TEXT, prompt=["a"]).prompt == TextPrompt(text="a")


def test_a_schema_beside_the_type(http: httpx.Client, server: ScriptedServer) -> None:
    for kind in ("json_object", "json_schema"):
        form = {"type": kind, "schema": {"type": "array"}}
        sampling = sent(http, server, CHAT, response_format=form).sampling
        assert sampling.structured_outputs == {"json": '{"type":"array"}'}
    form = {"type": "json_schema", "schema": {"type": "array"}, "json_schema": {"schema": {}}}
    body = {"messages": [{"role": "user", "content": "a"}], "response_format": form}
    refused = http.post(CHAT, json=body)
    assert refused.json()["error"]["param"] == "response_format.schema"


def test_an_answer_as_clients_send_it_back(http: httpx.Client, server: ScriptedServer) -> None:
    """An answer with only reasoning has no content. LiteLLM and OpenRouter repeat the reasoning."""
    spoken = {"role": "assistant", "content": None, "reasoning": "hm", "reasoning_details": [{}]}
    spoken |= {"thinking_blocks": [{}], "provider_specific_fields": {}}
    user = {"role": "user", "content": "b"}
    prompt = sent(http, server, CHAT, messages=[spoken, user]).prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages[0] == {"role": "assistant", "reasoning_content": "hm"}


def test_tools_as_mistrals_client_asks(http: httpx.Client, server: ScriptedServer) -> None:
    """It sends `prefix` with each message of the assistant."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    spoken = {"role": "assistant", "content": "a", "prefix": False}
    messages = [spoken, {"role": "user", "content": "b"}]
    prompt = sent(http, server, CHAT, messages=messages, tools=tools, tool_choice="any").prompt
    assert isinstance(prompt, ChatPrompt)
    assert (prompt.tool_choice, prompt.messages[0]) == (
        "required",
        {"role": "assistant", "content": "a"},
    )


def test_thinking(http: httpx.Client, server: ScriptedServer) -> None:
    for kind, switch in (("enabled", True), ("disabled", False)):
        prompt = sent(http, server, CHAT, thinking={"type": kind}).prompt
        assert prompt.template_args == {"enable_thinking": switch}
    both = {"thinking": {"type": "enabled"}, "enable_thinking": False}
    base = {"messages": [{"role": "user", "content": "a"}]}
    answer = http.post(CHAT, json=base | both)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "thinking")


@pytest.mark.parametrize(
    ("template", "switch"),
    [
        ("{% if not enable_thinking %}", "enable_thinking"),
        ("{%- if thinking is defined and thinking %}", "thinking"),
        ("{% if part.type == 'thinking' or message.thinking or thinking_text %}", ""),
        ("{% raise('the thinking comes first') %} thinking", ""),
    ],
)
def test_the_templates_own_switch(template: str, switch: str) -> None:
    assert detect_switch(template) == switch


MESSAGES: Any = {"model": MODEL, "messages": [{"role": "user", "content": "one two three"}]}


@pytest.mark.parametrize(
    ("path", "body", "cut"),
    [
        (CHAT, MESSAGES | {"max_tokens": 2}, '"finish_reason":"length"'),
        (TEXT, {"prompt": "one two three", "max_tokens": 2}, '"finish_reason":"length"'),
        ("/generate", {"text": "one two three", "max_tokens": 2}, '"finish_reason":"length"'),
        ("/v1/messages", MESSAGES | {"max_tokens": 2}, '"stop_reason":"max_tokens"'),
        (
            "/v1/responses",
            {"input": "one two three", "max_output_tokens": 2},
            '"max_output_tokens"}',
        ),
        ("/api/chat", MESSAGES | {"options": {"num_predict": 2}}, '"done_reason":"length"'),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_each_api_family_reports_that_the_limit_cut_the_answer(
    http: httpx.Client, path: str, body: dict[str, Any], cut: str, stream: bool
) -> None:
    assert cut in http.post(path, json=body | {"stream": stream}).text
    texts = json.dumps(body).replace("one two three", "one")
    assert cut not in http.post(path, json=json.loads(texts) | {"stream": stream}).text


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("more", [{}, {"return_token_ids": True}])
def test_usage_in_each_chunk(http: httpx.Client, path: str, more: dict[str, Any]) -> None:
    """GuideLLM asks for it."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    text = "one two three"
    prompt: dict[str, Any] = {"prompt": text}
    if path == CHAT:
        prompt = {"messages": [{"role": "user", "content": text}]}
    body = {**prompt, **more, "n": 2, "stream": True, "stream_options": options}
    lines = http.post(path, json=body).text.split("\n\n")
    usages = [json.loads(line[6:])["usage"] for line in lines if line.startswith("data: {")]
    *counts, last = [usage["completion_tokens"] for usage in usages]
    assert counts == sorted(counts)
    assert {*counts} >= set(range(1, 9))
    assert last == 6  # the script does not count its full stops
    assert {usage["prompt_tokens"] for usage in usages} == {3}
    assert all(u["total_tokens"] == 3 + u["completion_tokens"] for u in usages)
    assert ["prompt_tokens_details" in usage for usage in usages] == [False] * (len(usages) - 1) + [
        True
    ]
    body["stream_options"] = {"continuous_usage_stats": True}
    lines = http.post(path, json=body).text.split("\n\n")
    assert not any("usage" in json.loads(line[6:]) for line in lines if line.startswith("data: {"))
