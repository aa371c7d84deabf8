"""OpenAI's Responses as the official client sees them, over a scripted pipeline."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import openai
import pytest

from helpers.api_requests import CUSTOM_TOOL, RESPONSES, TOOL, messages_of
from helpers.scripted_server import MODEL, ScriptedServer
from minisgl.core import Accepted, Finished
from minisgl.core.answer import Part
from minisgl.message import ChatPrompt, TokenizeMsg
from minisgl.message.frontend import UserReply
from minisgl.server.api.answers import CompletionTokensDetails, TokenLogprob, Usage
from minisgl_gateway.chat import End
from minisgl_gateway.responses.answer import OutputMessage, ResponseObject
from minisgl_gateway.responses.request import ResponsesRequest
from minisgl_gateway.responses.stream import ResponseForm
from minisgl_gateway.responses.tools import offered_tools


def test_a_whole_response(client: openai.OpenAI, server: ScriptedServer) -> None:
    answer = client.responses.create(
        model=MODEL,
        input="one two",
        instructions="be brief",
        temperature=0.5,
        top_p=0.25,
        max_output_tokens=9,
        metadata={"a": "b"},
        store=False,
    )
    assert answer.id.startswith("resp_")
    assert (answer.object, answer.status, answer.error) == ("response", "completed", None)
    assert answer.output_text == "one two ."
    (item,) = answer.output
    assert item.type == "message"
    assert (item.role, item.status) == ("assistant", "completed")
    assert answer.usage
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (2, 2)
    assert answer.usage.input_tokens_details.cached_tokens == 1
    assert (answer.metadata, answer.instructions) == ({"a": "b"}, "be brief")
    assert (answer.temperature, answer.top_p, answer.max_output_tokens) == (0.5, 0.25, 9)
    assert messages_of(server) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one two"},
    ]
    sampling = server.received[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.5, 0.25, 9)


def test_a_response_that_is_cut(client: openai.OpenAI) -> None:
    answer = client.responses.create(model=MODEL, input="one two three", max_output_tokens=2)
    assert answer.status == "incomplete"
    assert answer.incomplete_details
    assert answer.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize("most", [100, 2])
def test_a_stream_adds_up_to_the_whole_response(client: openai.OpenAI, most: int) -> None:
    request: dict[str, Any] = {"model": MODEL, "input": "one 二 \U0001f600"}
    request |= {"max_output_tokens": most, "include": ["message.output_text.logprobs"]}
    events = list(client.responses.create(**request, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events if event.type != "response.output_text.delta"]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed" if most == 100 else "response.incomplete",
    ]
    whole = client.responses.create(**request)
    last = events[-1]
    assert last.type in ("response.completed", "response.incomplete")
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(delta.delta for delta in deltas) == whole.output_text
    assert sum(len(delta.logprobs) for delta in deltas) == len(deltas)
    for answer in (last.response, whole):
        del answer.id, answer.created_at, answer.output[0].id
    assert last.response == whole
    if most == 100:
        with client.responses.stream(**request) as stream:
            assert stream.get_final_response().output_text == whole.output_text


@pytest.mark.parametrize(
    ("parts", "kinds", "num_logprobs"),
    [
        ("call:f arguments:{}", ["function_call"], 0),
        ("reasoning:hm reasoning:so content:yes", ["reasoning", "message"], 2),
        ("reasoning:hm", ["reasoning"], 0),
    ],
)
def test_log_probabilities_are_those_of_the_text(
    client: openai.OpenAI, parts: str, kinds: list[str], num_logprobs: int
) -> None:
    """An end of sequence behind a call is no message, and reasoning is no part of a message."""
    words = " ".join(f"!part:{part}" for part in parts.split())
    request: dict[str, Any] = {"model": MODEL, "input": words}
    request |= {"include": ["message.output_text.logprobs"]}
    *_, last = client.responses.create(**request, stream=True)
    for answer in (last.response, client.responses.create(**request)):
        assert [item.type for item in answer.output] == kinds
        shown = [item.content[0].logprobs for item in answer.output if item.type == "message"]
        assert sum(map(len, shown)) == num_logprobs


def test_each_text_has_its_own_log_probabilities() -> None:
    """Of two texts around a call the first gets those that come with both."""
    answers: list[ResponseObject] = []
    model: Any = SimpleNamespace(name=MODEL, given_or_default=lambda *_: 1.0)
    begun = ResponseObject.begun(model, ResponsesRequest(input="a"))
    form = ResponseForm(begun, answers.append, offered_tools(()))
    first, second = (
        TokenLogprob(token=name, bytes=[], logprob=-1.0, top_logprobs=[]) for name in "ab"
    )
    form.text([("content", "a"), ("call", "f"), ("arguments", "{}"), ("content", "b")], [first])
    form.text([("content", "c")], [second])
    usage = Usage(prompt_tokens=1, completion_tokens=2, total_tokens=3)
    form.end(End(is_cut=False, stop=None, usage=usage, timings=msgspec.UNSET))
    (answer,) = answers
    texts = [item.content[0] for item in answer.output if isinstance(item, OutputMessage)]
    assert [(each.text, each.logprobs) for each in texts] == [("a", [first]), ("bc", [second])]


def test_log_probabilities_of_calls_are_left_out_of_a_whole_answer() -> None:
    model: Any = SimpleNamespace(name=MODEL, given_or_default=lambda *_: 1.0)
    begun = ResponseObject.begun(model, ResponsesRequest(input="a"))
    texts = ["<think>", "\n", "I", " look.", "<call>", "f", "</call>"]
    tokens = [
        TokenLogprob(token=text, bytes=list(text.encode()), logprob=-1.0, top_logprobs=[])
        for text in texts
    ]
    details = CompletionTokensDetails(reasoning_tokens=1)
    usage = Usage(
        prompt_tokens=1, completion_tokens=7, total_tokens=8, completion_tokens_details=details
    )
    end = End(is_cut=False, stop=None, usage=usage, timings=msgspec.UNSET)
    call: list[Part] = [("call", "f"), ("arguments", "{}")]
    form = ResponseForm(begun, lambda _: None, offered_tools(()))
    message, _ = form.whole([("content", "I "), ("content", "look."), *call], tokens, end).output
    assert isinstance(message, OutputMessage)
    assert message.content[0].logprobs == tokens[1:4]


def test_input_items_become_messages_of_a_chat(
    client: openai.OpenAI, server: ScriptedServer
) -> None:
    text = {"type": "input_text", "text": "weather?"}
    items: Any = [
        {"role": "developer", "content": "rules"},
        {"type": "message", "role": "user", "content": [text]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm"}],
            "encrypted_content": "of another server",
        },
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "I call", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"role": "user", "content": "so?"},
    ]
    client.responses.create(model=MODEL, input=items)
    assert messages_of(server) == [
        {"role": "developer", "content": "rules"},
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": "I call",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "content": "rain", "tool_call_id": "c1"},
        {"role": "user", "content": "so?"},
    ]


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"temperature": 3.0}, "temperature"),
        ({"background": True}, "background"),
        ({"truncation": "none"}, "truncation"),
        ({"tools": [{"type": "file_search"}]}, "function, custom or namespace, got 'file_s"),
        ({"tools": [CUSTOM_TOOL | {"format": {"type": "yaml"}}]}, r"tools\[0\].format"),
        ({"tools": [TOOL | {"allowed_callers": ["code"]}]}, r"allowed_callers must be"),
        ({"tools": [{"type": "namespace", "tools": []}]}, r"tools\[0\].name"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": [1]}]}, r"tools\[0\].tools"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": [{}]}]}, r"tools\[0\].tools\[0\]"),
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"input": []}, "at least one item"),
        ({"input": [{"role": "user"}]}, r"input\[0\].content"),
        ({"input": [{"type": "function_call", "name": "f"}]}, r"input\[0\].arguments"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "reads text only"),
        ({"reasoning": {"mode": "pro"}}, r"reasoning.mode"),
        ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, "at least one item"),
        ({"input": [{"type": "custom_tool_call", "name": "f"}]}, r"input\[0\].input"),
        ({"tools": [TOOL | {"name": "no spaces"}]}, r"tools\[0\]"),
        ({"nonsense": 1}, "nonsense is not known"),
        ({"max_tokens": 1}, "max_output_tokens"),
    ],
)
def test_refusals(client: openai.OpenAI, fields: dict[str, Any], match: str) -> None:
    with pytest.raises(openai.BadRequestError, match=match):
        client.responses.create(model=MODEL, input="a", extra_body=fields)


def test_neutral_values(client: openai.OpenAI) -> None:
    client.responses.create(
        model=MODEL,
        input="a",
        include=["reasoning.encrypted_content"],
        reasoning={"summary": "auto"},
        text={"format": {"type": "text"}, "verbosity": "medium"},
        tools=[],
        parallel_tool_calls=True,
        prompt_cache_key="k",
        service_tier="auto",
        truncation="disabled",
        background=False,
    )


def test_options_of_the_chat(http: httpx.Client, server: ScriptedServer) -> None:
    body = {"input": "a", "chat_template_kwargs": {"style": "x"}, "parallel_tool_calls": False}
    assert http.post("/v1/responses", json=body).status_code == 200
    prompt = server.received[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.template_args == {"style": "x"}
    assert not prompt.parallel_tool_calls


def test_failures(client: openai.OpenAI, http: httpx.Client, server: ScriptedServer) -> None:
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="other", input="a")
    with pytest.raises(openai.BadRequestError) as raised:
        client.responses.create(model=MODEL, input="!refuse")
    assert raised.value.param == "input"
    with pytest.raises(openai.InternalServerError, match="out of luck"):
        client.responses.create(model=MODEL, input="!fail")
    stream = client.responses.create(model=MODEL, input="one !pause !fail", stream=True)
    assert next(stream).type == "response.created"
    server.resumed.set()  # not before: a request that fails at once is a 500
    *_, last = stream
    assert last.type == "response.failed"
    assert last.response.error
    assert "out of luck" in last.response.error.message
    assert http.get(f"{RESPONSES}/{last.response.id}").status_code == 404


def test_an_empty_answer_has_an_empty_message() -> None:
    def answer(message: TokenizeMsg, resumed: threading.Event) -> Iterator[UserReply]:
        yield Accepted(uid=message.uid, num_prompt_tokens=1, sampling=message.sampling)
        yield Finished(uid=message.uid, reason="stop", num_prompt_tokens=1, num_output_tokens=1)

    with ScriptedServer(answer=answer) as server:
        body = {"model": MODEL, "input": "a"}
        whole = httpx.post(f"{server.url}{RESPONSES}", json=body).json()
        streamed = httpx.post(f"{server.url}{RESPONSES}", json=body | {"stream": True}).text
    *_, last = (line for line in streamed.splitlines() if line.startswith("data: "))
    for response in (whole, json.loads(last.removeprefix("data: "))["response"]):
        (item,) = response["output"]
        assert (item["type"], item["content"][0]["text"]) == ("message", "")
