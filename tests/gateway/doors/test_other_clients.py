"""Fields and answers that clients of vLLM, SGLang, llama.cpp and mini-sglang know."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from helpers.api_requests import CHAT, GENERATE, TEXT, chat, events, refused
from helpers.running_server import RunningServer
from helpers.scripted_server import MODEL, ScriptedServer
from minisgl.message import ChatPrompt, TextPrompt, TokenPrompt, TokenText, ids_from_bytes
from minisgl.server.api.answers import TextLogprobs
from minisgl.server.api.structured import ALIASES


@pytest.mark.parametrize("stop", ["two", None])
def test_stop_reason_is_the_stop_string_that_ended_the_answer(
    client: openai.OpenAI, http: httpx.Client, stop: str | None
) -> None:
    whole = client.chat.completions.create(**chat("one two"), stop=stop).choices[0]
    assert whole.model_extra == {"stop_reason": stop}
    text = client.completions.create(model=MODEL, prompt="one two", stop=stop).choices[0]
    assert text.model_extra == {"stop_reason": stop}
    for path, body in ((CHAT, chat("one two")), (TEXT, {"prompt": "one two"})):
        chunks = events(http.post(path, json=body | {"stop": stop, "stream": True}))[:-1]
        choices: list[dict[str, Any]] = [chunk["choices"][0] for chunk in chunks]
        assert all("stop_reason" not in choice for choice in choices[:-1])
        assert choices[-1]["stop_reason"] == stop


def test_the_likeliest_tokens_of_a_text_have_the_sampled_one_too() -> None:
    token = TokenText(data=b"b", offset=0, top=[(1, b"a", -0.5)])
    assert TextLogprobs.of([token], [-3.0]).top_logprobs == [{"a": -0.5, "b": -3.0}]


def test_what_responses_cannot_do_is_a_404_that_says_so(
    client: openai.OpenAI, http: httpx.Client
) -> None:
    with pytest.raises(openai.NotFoundError, match="not supported here: /tokenize"):
        client.responses.input_tokens.count(model=MODEL, input="a")
    error = refused(http.post("/v1/responses/compact", json={"input": "a"}), 404)
    assert "/v1/responses/compact is not supported here" in error["message"]
    assert "/tokenize" in error["message"]


def test_the_original_client_of_generate(http: httpx.Client, server: ScriptedServer) -> None:
    """Its clients send these three fields, and read lines that begin with "data: "."""
    body = {"prompt": "one three", "max_tokens": 2, "ignore_eos": True, "stream": True}
    assert [each["text"] for each in events(http.post(GENERATE, json=body))[:-1]][:2] == [
        "one ",
        "three ",
    ]
    message = server.received[-1]
    assert message.prompt == TextPrompt(text="one three")
    assert (message.sampling.max_tokens, message.sampling.ignore_eos) == (2, True)
    assert http.post(GENERATE, json={"prompt": [5, 6]}).json()["text"] == "5 6 ."
    prompt = server.received[-1].prompt
    assert isinstance(prompt, TokenPrompt)
    assert ids_from_bytes(prompt.ids).tolist() == [5, 6]


def test_a_prompt_of_a_chat_is_a_users_message(http: httpx.Client, server: ScriptedServer) -> None:
    assert http.post(CHAT, json={"prompt": "one"}).status_code == 200
    prompt = server.received[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages == [{"role": "user", "content": "one"}]
    assert refused(http.post(CHAT, json=chat("two") | {"prompt": "one"}))["param"] == "prompt"
    for body in ({}, {"prompt": None}):
        assert refused(http.post(CHAT, json=body))["message"] == "the field messages is missing"


VALUES: dict[str, tuple[Any, Any, Any]] = {  # an alias: its value, another one, a wrong one
    "max_completion_tokens": (3, 4, -2),
    "n_predict": (3, 4, -2),
    "repeat_penalty": (1.5, 2.0, "a"),
    "prompt": ("one", "two", 5),
}


@pytest.mark.parametrize("alias", ALIASES, ids=lambda alias: f"{alias.theirs}-{alias.ours}")
@pytest.mark.parametrize("path", [CHAT, TEXT, GENERATE])
def test_an_alias_means_our_field(
    http: httpx.Client, server: ScriptedServer, path: str, alias: Any
) -> None:
    """The scheduler gets the same; both names with different values are refused."""
    value, other, wrong = VALUES[alias.theirs]
    if alias.kind is list:
        value, other, wrong = [1, 2], [3], ["a"]
    base = {} if alias.theirs == "prompt" else {CHAT: chat("a")}.get(path, {"prompt": "a"})
    ours = alias.form(value)
    first = http.post(path, json=base | {alias.ours: ours, "seed": 1})
    if first.status_code == 400 and f"the field {alias.ours} is not known" in first.text:
        return  # this form has neither of them
    if alias.theirs == "prompt" and (path == TEXT or (alias.ours == "messages" and path != CHAT)):
        return  # text completions have a prompt of their own; /generate's is a text
    if alias.theirs == "max_completion_tokens" and path != CHAT:
        return
    assert first.status_code == 200, first.text
    expected = server.received[-1]
    again = http.post(path, json=base | {alias.theirs: value, "seed": 1})
    assert again.status_code == 200, again.text
    got = server.received[-1]
    assert (got.prompt, got.sampling) == (expected.prompt, expected.sampling)
    both = {alias.ours: ours, alias.theirs: other}
    assert "mean the same and differ" in refused(http.post(path, json=base | both))["message"]
    error = refused(http.post(path, json=base | {alias.theirs: wrong}))
    assert error["param"] is not None
    assert error["param"].startswith(alias.theirs)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, chat("!refuse:max_tokens", max_completion_tokens=5), "max_completion_tokens"),
        (CHAT, chat("!refuse:max_tokens", max_tokens=5), "max_tokens"),
        (CHAT, chat("!refuse"), "messages"),
        (CHAT, {"prompt": "!refuse"}, "prompt"),
        (TEXT, {"prompt": "!refuse:max_tokens", "n_predict": 5}, "n_predict"),
        (TEXT, {"prompt": "a", "repeat_penalty": 99.0}, "repeat_penalty"),
        (GENERATE, {"prompt": "!refuse"}, "prompt"),
        (GENERATE, {"text": "!refuse"}, "text"),
    ],
)
def test_a_refusal_names_the_alias_that_was_sent(
    http: httpx.Client, path: str, body: dict[str, Any], param: str
) -> None:
    response = http.post(path, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_one_form_by_two_names(http: httpx.Client, server: ScriptedServer) -> None:
    """guidance names it by vLLM's old field and its new one. Two forms that differ are refused."""
    same = {"guided_grammar": "a", "structured_outputs": {"grammar": "a"}}
    fields = {**same, "guided_decoding_backend": "guidance"}
    assert http.post(CHAT, json=chat("one") | fields).status_code == 200
    assert server.received[-1].sampling.structured_outputs == {"grammar": "a"}
    error = refused(http.post(CHAT, json=chat("one") | fields | {"guided_grammar": "b"}))
    assert error["message"].endswith("an answer has one form")
    error = refused(http.post(CHAT, json=chat("one") | {"ebnf": "b", "grammar": "a"}))
    assert error["message"] == "give grammar or ebnf: an answer has one form"
    assert error["param"] == "grammar"


def test_a_part_may_repeat_its_message(http: httpx.Client, server: ScriptedServer) -> None:
    """OpenAI's agents for Node send an earlier answer back so."""
    said = http.post(CHAT, json=chat("one")).json()["choices"][0]["message"]
    repeated = {"tool_calls": [], "reasoning_content": "hm", "annotations": []}
    part = {"type": "text", "text": said.pop("content"), **said, **repeated}
    turns = [{"role": "assistant", "content": [part]}, {"role": "user", "content": "two"}]
    assert http.post(CHAT, json={"messages": turns}).status_code == 200
    prompt = server.received[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    assert [each["text"] for each in prompt.messages[0]["content"]] == ["one ."]
    error = refused(http.post(CHAT, json={"messages": [turns[0] | {"content": [part | {"a": 1}]}]}))
    assert error["param"] == "messages[0].content[0].a"


def test_a_prompt_to_tokenize_is_a_text(http: httpx.Client, server: ScriptedServer) -> None:
    """It has both fields, which do not mean the same."""
    assert http.post("/tokenize", json={"prompt": "one"}).status_code == 200
    assert server.encoded[-1] == TextPrompt(text="one")


def test_n_predict_of_llama_cpp_may_be_without_limit(
    http: httpx.Client, server: ScriptedServer
) -> None:
    assert http.post(CHAT, json=chat("one") | {"n_predict": -1}).status_code == 200
    assert server.received[-1].sampling.max_tokens is None
    none = {"prompt": "one", "echo": True, "max_tokens": 0, "n_predict": 3}
    assert "mean the same and differ" in refused(http.post(TEXT, json=none))["message"]
    error = refused(http.post(CHAT, json=chat("one") | {"cache_prompt": False}))
    assert (error["param"], "cache_salt" in error["message"]) == ("cache_prompt", True)


TURN = [{"role": "user", "content": "hi"}]


def test_prompt_token_ids_stand_beside_token_ids(builtin: RunningServer) -> None:
    """Whole answers have them, and of a stream only the first event. They are /tokenize's."""
    with httpx.Client(base_url=builtin.url, timeout=60) as http:
        for path, body in ((CHAT, {"messages": TURN}), (TEXT, {"prompt": "hi there"})):
            ids = http.post("/tokenize", json=body).json()["tokens"]
            asked = body | {"return_token_ids": True, "max_tokens": 3, "n": 2}

            def found(answer: dict[str, Any], path: str = path) -> list[Any]:
                holders = [answer] if path == CHAT else answer["choices"]
                return [holder.get("prompt_token_ids") for holder in holders]

            assert found(http.post(path, json=asked).json()) == [ids] * (1 if path == CHAT else 2)
            assert found(http.post(path, json=body | {"max_tokens": 3}).json()) == [None]
            chunks = events(http.post(path, json=asked | {"stream": True}))[:-1]
            shown = [each for chunk in chunks for each in found(chunk) if each]
            assert found(chunks[0]) == [ids]
            assert shown == [ids] * (1 if path == CHAT else 2)
