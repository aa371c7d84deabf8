"""The OpenAI families as the official client sees them, over a scripted pipeline."""

from __future__ import annotations

import time
from typing import Any

import httpx
import openai
import pytest

from helpers.api_requests import chat, events
from helpers.scripted_server import MODEL, OTHER_NAME, ScriptedServer
from minisgl.message import ChatPrompt, TokenPrompt, ids_from_bytes


def test_chat_whole(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**chat("one two three four"))
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == MODEL
    assert abs(answer.created - time.time()) < 60
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == "one two three four ."
    assert choice.finish_reason == "stop"
    assert answer.usage
    assert answer.usage.prompt_tokens == 4
    assert answer.usage.completion_tokens == 4
    assert answer.usage.total_tokens == 8
    assert answer.usage.prompt_tokens_details
    assert answer.usage.prompt_tokens_details.cached_tokens == 2


def test_chat_length(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**chat("one two three", max_completion_tokens=2))
    assert answer.choices[0].message.content == "one two "
    assert answer.choices[0].finish_reason == "length"


def test_chat_stream(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            **chat("one 二 \U0001f600\n"), stream=True, stream_options={"include_usage": True}
        )
    )
    assert len({chunk.id for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    *content, last, usage = chunks
    assert content[0].choices[0].delta.role == "assistant"
    texts = [chunk.choices[0].delta.content for chunk in content[1:]]
    assert texts == ["one ", "二 ", "\U0001f600 ", "."]
    assert [chunk.choices[0].finish_reason for chunk in content] == [None] * len(content)
    assert last.choices[0].finish_reason == "stop"
    assert last.choices[0].delta.content is None
    assert all(chunk.usage is None for chunk in (*content, last))
    assert usage.choices == []
    assert usage.usage
    assert usage.usage.total_tokens == 6


def test_chat_stream_frames(http: httpx.Client) -> None:
    data = events(http.post("/v1/chat/completions", json=chat("one", stream=True)))
    assert data[-1] == "[DONE]"
    assert all("usage" not in chunk for chunk in data[:-1])
    data = events(
        http.post(
            "/v1/chat/completions",
            json=chat("one", stream=True, stream_options={"include_usage": True}),
        )
    )
    assert [chunk["usage"] is None for chunk in data[:-1]] == [True] * (len(data) - 2) + [False]


def test_completions_of_every_prompt_form(client: openai.OpenAI, server: ScriptedServer) -> None:
    for prompt, texts in (
        ("a b", ["a b ."]),
        (["a b", "c"], ["a b .", "c ."]),
        ([7, 8], ["7 8 ."]),
        ([[7, 8], [2**31 - 1]], ["7 8 .", "2147483647 ."]),
    ):
        answer = client.completions.create(model=MODEL, prompt=prompt)
        assert [choice.text for choice in answer.choices] == texts
        assert [choice.index for choice in answer.choices] == list(range(len(texts)))
        assert answer.usage
        assert answer.usage.completion_tokens == sum(text.count(" ") for text in texts)
    assert isinstance(server.received[-1].prompt, TokenPrompt)
    assert list(ids_from_bytes(server.received[-1].prompt.ids)) == [2**31 - 1]
    assert server.received[-1].sampling.seed != server.received[-2].sampling.seed


def test_completions_stream_of_several(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model=MODEL,
        prompt=["a b c", "d"],
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, usage = list(stream)
    texts, reasons = ["", ""], [None, None]
    for chunk in chunks:
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == ["a b c .", "d ."]
    assert reasons == ["stop", "stop"]
    assert usage.usage
    assert usage.usage.prompt_tokens == 4


def test_every_sampling_field_arrives(client: openai.OpenAI, server: ScriptedServer) -> None:
    client.chat.completions.create(
        **chat("a"),
        temperature=0.5,
        top_p=0.75,
        seed=2**64 - 1,
        stop=["x", "y"],
        max_tokens=7,
        extra_body={
            "top_k": 5,
            "min_p": 0.125,
            "ignore_eos": True,
            "stop_token_ids": [3, 4],
            "skip_special_tokens": False,
            "include_stop_str_in_output": True,
            "truncate_prompt_tokens": 9,
            "priority": -3,
            "cache_salt": "tenant 1",
            "chat_template_kwargs": {"enable_thinking": False},
        },
    )
    message = server.received[-1]
    sampling = message.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.75, 5)
    assert (sampling.min_p, sampling.seed, sampling.max_tokens) == (0.125, 2**64 - 1, 7)
    assert (sampling.stop, sampling.stop_token_ids) == (("x", "y"), (3, 4))
    assert sampling.ignore_eos
    assert not sampling.skip_special_tokens
    assert sampling.include_stop_str_in_output
    assert sampling.truncate_prompt_tokens == 9
    assert message.priority == -3
    assert message.namespace == "tenant 1"
    assert isinstance(message.prompt, ChatPrompt)
    assert message.prompt.template_args == {"enable_thinking": False}


def test_missing_fields_take_the_checkpoints_defaults(
    client: openai.OpenAI, server: ScriptedServer
) -> None:
    client.completions.create(model=MODEL, prompt="a", stop="x")
    sampling = server.received[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.25, 1.0, None)
    assert sampling.stop == ("x",)
    assert sampling.seed is not None
    assert 0 <= sampling.seed < 2**63


def test_messages_reach_the_tokenizer(client: openai.OpenAI, server: ScriptedServer) -> None:
    part = {"type": "text", "text": "two"}
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "add", "arguments": '{"x": 1}'},
    }
    client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "one"}, part], "name": "Eve"},
            {"role": "assistant", "tool_calls": [call], "refusal": None},
            {"role": "tool", "content": "3", "tool_call_id": "1"},
        ],
    )
    prompt = server.received[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages == [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, part], "name": "Eve"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "1"},
    ]


def test_fields_that_clients_add_to_a_call_do_not_reach_the_template(
    server: ScriptedServer, client: openai.OpenAI
) -> None:
    """OpenAI's stream and parse helpers add fields to a message, which a program sends back."""
    function = {"name": "now", "arguments": "{}"}
    tool: Any = {"type": "function", "function": {"name": "now", "parameters": {}, "strict": True}}
    asked: Any = chat("!part:call:now !part:arguments:{}", tools=[tool])
    parsed = client.chat.completions.parse(**asked)
    with client.chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion()
    for answer in (parsed, streamed):
        message: Any = answer.choices[0].message.model_dump()
        [call] = message["tool_calls"]
        assert call["function"]["parsed_arguments"] == {}
        result: Any = {"role": "tool", "content": "noon", "tool_call_id": call["id"]}
        client.chat.completions.create(
            **{**asked, "messages": [*asked["messages"], message, result]}
        )
        prompt = server.received[-1].prompt
        assert isinstance(prompt, ChatPrompt)
        told = {"id": call["id"], "type": "function", "function": function}
        assert prompt.messages[1]["tool_calls"] == [told]
    assert "index" in call


def test_an_answer_can_be_sent_back(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(**chat("one"))
    messages = [
        {"role": "user", "content": "one"},
        first.choices[0].message.model_dump(),
        {"role": "user", "content": "two"},
    ]
    second = client.chat.completions.create(model=MODEL, messages=messages)
    assert second.choices[0].message.content == "two ."


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL, OTHER_NAME]
    assert client.models.retrieve(MODEL).owned_by == "minisgl"
    with pytest.raises(openai.NotFoundError, match="scripted"):
        client.models.retrieve("org/other")


def test_unknown_model(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match=r"'scripted' .*--served-model-name") as error:
        client.completions.create(model="gpt-4", prompt="a")
    assert error.value.code == "model_not_found"
    assert error.value.param == "model"


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_by_the_scheduler_is_a_4xx(client: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError, match="too long") as error:
        client.chat.completions.create(**chat("!refuse"), stream=stream)
    assert error.value.code == "context_length_exceeded"
    assert error.value.param == "messages"  # the scheduler says "prompt"; the client said this


def test_one_refused_prompt_refuses_the_call(client: openai.OpenAI, server: ScriptedServer) -> None:
    before = len(server.aborted)
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(model=MODEL, prompt=["!hang", "!refuse", "!hang"])
    assert raised.value.param == "prompt[1]"
    assert "prompt[1]: too long" in str(raised.value)
    assert len(server.wait_aborted(before + 2)) == before + 2


def test_failure_in_mid_stream(
    client: openai.OpenAI, http: httpx.Client, server: ScriptedServer
) -> None:
    server.resumed.clear()
    stream = client.chat.completions.create(**chat("one !pause !fail"), stream=True)
    assert [next(stream).choices[0].delta.content for _ in range(2)] == ["", "one "]
    body = chat("one !pause !fail", stream=True)
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        server.resumed.set()  # both answers have begun
        response.read()
    with pytest.raises(openai.APIError, match="out of luck"):
        next(stream)
    data = events(response)
    assert data[-1]["error"]["type"] == "server_error"
    assert "[DONE]" not in data


@pytest.mark.parametrize("text", ["one !fail", "one !abort"])
def test_failure_of_a_whole_answer_is_a_5xx(client: openai.OpenAI, text: str) -> None:
    with pytest.raises(openai.InternalServerError):
        client.chat.completions.create(**chat(text))


def test_a_final_message_is_continued(client: openai.OpenAI, server: ScriptedServer) -> None:
    options: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
    client.chat.completions.create(**chat("one"), extra_body=options)
    prompt = server.received[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.template_args == options
    options["add_generation_prompt"] = True
    with pytest.raises(openai.BadRequestError, match="set one of them"):
        client.chat.completions.create(**chat("one"), extra_body=options)
