"""What clients of other servers write differently, and what reaches the tokenizer then."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from helpers.scripted_server import ScriptedServer
from minisgl.message import ChatPrompt, TextPrompt
from minisgl.tokenizer.parse.formats import detect_switch

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def sent(http: httpx.Client, server: ScriptedServer, path: str, **fields: Any) -> Any:
    base: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
    answer = http.post(path, json=(base if path == CHAT else {"prompt": "a"}) | fields)
    assert answer.status_code == 200, answer.text
    return server.received[-1]


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_all_tokens(http: httpx.Client, server: ScriptedServer, path: str) -> None:
    assert sent(http, server, path, top_k=-1).sampling.top_k == 0


def test_a_rendered_prompt(http: httpx.Client, server: ScriptedServer) -> None:
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


def test_what_clients_keep_of_an_answer(http: httpx.Client, server: ScriptedServer) -> None:
    """An answer of reasoning alone has no content; LiteLLM and OpenRouter say reasoning twice."""
    spoken = {"role": "assistant", "content": None, "reasoning": "hm", "reasoning_details": [{}]}
    spoken |= {"thinking_blocks": [{}], "provider_specific_fields": {}}
    user = {"role": "user", "content": "b"}
    prompt = sent(http, server, CHAT, messages=[spoken, user]).prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages[0] == {"role": "assistant", "content": "", "reasoning_content": "hm"}


def test_thinking(http: httpx.Client, server: ScriptedServer) -> None:
    for kind, switch in (("enabled", True), ("disabled", False)):
        prompt = sent(http, server, CHAT, thinking={"type": kind}).prompt
        assert prompt.template_args == {"enable_thinking": switch}
    both = sent(http, server, CHAT, thinking={"type": "enabled"}, enable_thinking=False).prompt
    assert both.template_args == {"enable_thinking": False}


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
