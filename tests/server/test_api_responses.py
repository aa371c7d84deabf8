"""OpenAI's Responses as the official client sees them, over a scripted pipeline."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import openai
import pytest

from helpers.scripted_server import MODEL, ScriptedServer
from minisgl.core import Accepted, Finished
from minisgl.errors import InvalidRequest
from minisgl.message import ChatPrompt, TokenizeMsg
from minisgl.message.frontend import UserReply
from minisgl.server.api.messages import Message
from minisgl.server.api.response_store import ResponseStore

PATH = "/v1/responses"
CUSTOM = {"type": "custom", "name": "patch", "description": "Edits files."}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}


def messages_of(server: ScriptedServer) -> list[dict[str, Any]]:
    prompt = server.received[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt.messages


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


def test_namespaces_and_web_search(client: openai.OpenAI, server: ScriptedServer) -> None:
    """The requests are Codex's."""
    member: Any = {"type": "function", "name": "close", "parameters": {}, "description": "Close."}
    tools: Any = [
        {"type": "web_search", "external_web_access": True},
        {"type": "namespace", "name": "agents", "description": "Of agents.", "tools": [member]},
        TOOL,
    ]
    calls: Any = [
        {"type": "function_call", "call_id": "c", "name": "x", "namespace": "agents"}
        | {"arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "done"},
        {"role": "user", "content": "!part:call:agents.close !part:arguments:{}"},
    ]
    raw = client.responses.with_raw_response.create(model=MODEL, input=calls, tools=tools)
    warning = "left out: tools[0] (web_search)"
    assert raw.headers["x-minisgl-warning"] == warning
    answer = raw.parse()
    (call,) = answer.output
    assert call.type == "function_call"
    assert (call.namespace, call.name, call.arguments) == ("agents", "close", "{}")
    assert [tool.type for tool in answer.tools] == ["namespace", "function"]
    prompt = server.received[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    offered = [tool["function"] for tool in prompt.tools]
    assert [each["name"] for each in offered] == ["agents.close", TOOL["name"]]
    assert offered[0]["description"] == "Of agents.\nClose."
    assert prompt.messages[0]["tool_calls"][0]["function"]["name"] == "agents.x"
    again = client.responses.create(
        model=MODEL, input="more", previous_response_id=answer.id, tools=tools
    )
    spoken = messages_of(server)[-2]
    assert spoken["tool_calls"][0]["function"]["name"] == "agents.close"
    assert again.status == "completed"
    with client.responses.with_streaming_response.create(
        model=MODEL, input="a", tools=tools, stream=True
    ) as stream:
        assert stream.headers["x-minisgl-warning"] == warning
    plain = client.responses.with_raw_response.create(model=MODEL, input="a", tools=[TOOL])
    assert "x-minisgl-warning" not in plain.headers


PATCH = "*** Begin Patch\n+é"


def test_custom_tools(client: openai.OpenAI, server: ScriptedServer) -> None:
    """Their input is a text, so for the model they are functions with one argument."""
    grammar = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}
    tools: Any = [
        {**CUSTOM, "format": grammar},
        {"type": "namespace", "name": "n", "description": "", "tools": [CUSTOM]},
        TOOL,
    ]
    choice: Any = {"type": "custom", "name": "patch"}
    spoken = msgspec.json.encode({"input": PATCH}).decode().replace(" ", "\\u0020")
    text = f"!part:call:patch !part:arguments:{spoken[:9]} !part:arguments:{spoken[9:]} "
    text += "!part:call:n.patch !part:arguments:{oops !part:call:f !part:arguments:{}"
    request: Any = {"model": MODEL, "input": text, "tools": tools, "tool_choice": choice}
    whole = client.responses.create(**request)
    prompt = server.received[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.tool_choice == "patch"
    shown = prompt.tools[0]["function"]
    assert shown["description"] == (
        'Edits files.\nThe input follows this lark grammar:\nstart: "a"'
    )
    assert shown["parameters"]["required"] == ["input"]
    first, second, third = whole.output
    assert first.type == second.type == "custom_tool_call"
    assert (first.name, first.input) == ("patch", PATCH)
    assert (second.namespace, second.name, second.input) == ("n", "patch", "{oops")
    assert third.type == "function_call"
    events = list(client.responses.create(**request, stream=True))
    deltas = [e.delta for e in events if e.type == "response.custom_tool_call_input.delta"]
    done = [e.input for e in events if e.type == "response.custom_tool_call_input.done"]
    assert deltas == done == [PATCH, "{oops"]
    items: Any = [item.model_dump(exclude_unset=True) for item in whole.output]
    output: Any = {"type": "custom_tool_call_output", "call_id": first.call_id, "output": "done"}
    client.responses.create(model=MODEL, input=[*items, output])
    assistant, tool = messages_of(server)
    calls = [call["function"] for call in assistant["tool_calls"]]
    assert msgspec.json.decode(calls[0]["arguments"]) == {"input": PATCH}
    assert [call["name"] for call in calls] == ["patch", "n.patch", "f"]
    assert tool == {"role": "tool", "tool_call_id": first.call_id, "content": "done"}
    client.responses.create(model=MODEL, input=[output], previous_response_id=whole.id)
    assert messages_of(server)[1:] == [assistant, tool]


def test_a_conversation_by_id(client: openai.OpenAI, server: ScriptedServer) -> None:
    first = client.responses.create(model=MODEL, input="one", instructions="gone next time")
    events = client.responses.create(
        model=MODEL, input="two", previous_response_id=first.id, stream=True
    )
    second = list(events)[-1].model_dump()["response"]["id"]
    client.responses.create(model=MODEL, input="three", previous_response_id=second)
    assert [(m["role"], m["content"]) for m in messages_of(server)] == [
        ("user", "one"),
        ("assistant", "one ."),
        ("user", "two"),
        ("assistant", "two ."),
        ("user", "three"),
    ]
    assert client.responses.retrieve(first.id) == first
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="no response"):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError, match="no response") as raised:
        client.responses.create(model=MODEL, input="x", previous_response_id=first.id)
    assert raised.value.code == "previous_response_not_found"
    assert raised.value.param == "previous_response_id"
    unkept = client.responses.create(model=MODEL, input="one", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unkept.id)


def test_items_by_id(client: openai.OpenAI, server: ScriptedServer) -> None:
    """The AI SDK sends stored items in this form."""
    text = "!part:reasoning:hm !part:content:so !part:call:f !part:arguments:{}"
    first = client.responses.create(model=MODEL, input=text, tools=[TOOL])
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
    items: Any = [{"type": "item_reference", "id": item.id} for item in first.output]
    call = first.output[-1]
    assert call.type == "function_call"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "42"}
    again = client.responses.create(
        model=MODEL, input=[{"role": "user", "content": text}, *items, result], tools=[TOOL]
    )
    _, assistant, tool = messages_of(server)
    assert (assistant["reasoning_content"], assistant["content"]) == ("hm", "so")
    assert assistant["tool_calls"][0]["id"] == tool["tool_call_id"] == call.call_id
    client.responses.create(model=MODEL, input="more", previous_response_id=again.id)
    assert messages_of(server)[1:3] == [assistant, tool]
    client.responses.delete(first.id)
    for reference, says in (
        (items[0], "there is no item"),
        ({"type": items[0]["type"]}, "missing"),
    ):
        wrong: Any = [{"role": "user", "content": "a"}, reference]
        with pytest.raises(openai.BadRequestError, match=says) as raised:
            client.responses.create(model=MODEL, input=wrong)
        assert raised.value.param == "input[1].id"


def test_a_read_keeps_an_answer_and_a_deleted_one_makes_room() -> None:
    message = Message(role="user", content="x")
    size = len(msgspec.json.encode([[message], message]))
    store = ResponseStore(max_bytes=2 * size)
    for name in ("a", "b"):
        store.put(name, "alice", [message], message)
    store.get("a", "alice")
    store.put("c", "alice", [message], message)
    assert sorted(store._kept) == ["a", "c"]
    store.delete("c", "alice")
    store.put("d", "alice", [message], message)
    assert sorted(store._kept) == ["a", "d"]


def test_the_store_is_bounded_and_keeps_owners_apart() -> None:
    store = ResponseStore(max_bytes=3000)
    message = Message(role="user", content="x" * 300)
    for i in range(20):
        store.put(f"r{i}", "alice", [message], message)
    kept = [i for i in range(20) if store._kept.get(f"r{i}")]
    assert kept == list(range(20 - len(kept), 20))
    assert 1 < len(kept) < 6
    assert store._num_bytes == sum(each.num_bytes for each in store._kept.values()) <= 3000
    store.put("large", "alice", [message] * 20, message)
    with pytest.raises(InvalidRequest):
        store.get("large", "alice")
    with pytest.raises(InvalidRequest):
        store.get("r19", "bob")
    store.get(f"r{kept[0]}", "alice")
    store.put("new", "alice", [message], message)
    assert store.get(f"r{kept[0]}", "alice").messages == [message]
    with pytest.raises(InvalidRequest):
        store.get(f"r{kept[1]}", "alice")


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"temperature": 3.0}, "temperature"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "file_search"}]}, "function, custom or namespace, got 'file_s"),
        ({"tools": [CUSTOM | {"format": {"type": "yaml"}}]}, r"tools\[0\].format"),
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


SPLIT = (
    "!part:reasoning:hm !part:reasoning:so !part:content:I !part:content:call !part:call:f "
    '!part:arguments:{"a": !part:arguments:1} !part:call:g !part:arguments:{}'
)


def test_reasoning_text_and_calls_are_items(client: openai.OpenAI, server: ScriptedServer) -> None:
    tools: Any = [TOOL]
    request: Any = {"tool_choice": "required", "reasoning": {"effort": "low"}}
    with server.templated("{{ reasoning_effort }}"):
        whole = client.responses.create(model=MODEL, input=SPLIT, tools=tools, **request)
    prompt = server.received[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.tools == [
        {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    ]
    assert prompt.tool_choice == "required"
    assert prompt.template_args == {"reasoning_effort": "low"}
    reasoning, message, first, second = whole.output
    assert reasoning.type == "reasoning"
    assert reasoning.content
    assert reasoning.content[0].text == "hmso"
    assert message.type == "message"
    assert whole.output_text == "Icall"
    assert first.type == second.type == "function_call"
    assert (first.name, first.arguments) == ("f", '{"a":1}')
    assert (second.name, second.arguments) == ("g", "{}")
    assert whole.usage
    assert whole.usage.output_tokens_details.reasoning_tokens == 2
    events = list(client.responses.create(model=MODEL, input=SPLIT, tools=tools, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1]
    assert last.type == "response.completed"
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == last.response.output
    hidden = {"id", "call_id"}
    streamed = [item.model_dump(exclude=hidden) for item in last.response.output]
    assert streamed == [item.model_dump(exclude=hidden) for item in whole.output]
    for index, kind in ((0, "reasoning_text"), (2, "function_call_arguments")):
        deltas = [
            event.model_dump()["delta"]
            for event in events
            if event.type == f"response.{kind}.delta" and event.output_index == index
        ]
        assert "".join(deltas) == ("hmso" if index == 0 else '{"a":1}')
    with client.responses.stream(model=MODEL, input=SPLIT, tools=tools) as stream:
        final = stream.get_final_response()
        assert final.output_text == "Icall"
    items: Any = [item.model_dump() for item in final.output]
    assert items[2].keys() >= {"parsed_arguments", "async_"}  # which the client adds
    client.responses.create(model=MODEL, input=[{"role": "user", "content": "a"}, *items])
    assert messages_of(server)[1]["tool_calls"][0]["function"] == {
        "name": first.name,
        "arguments": first.arguments,
    }
    output: Any = {"type": "function_call_output", "call_id": first.call_id, "output": "42"}
    client.responses.create(model=MODEL, input=[output], previous_response_id=whole.id)
    told = messages_of(server)[1:]
    assert [call["id"] for call in told[0]["tool_calls"]] == [first.call_id, second.call_id]
    assert told[0]["reasoning_content"] == "hmso"
    assert told[1] == {"role": "tool", "content": "42", "tool_call_id": first.call_id}


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
    assert http.get(f"{PATH}/{last.response.id}").status_code == 404


def test_an_empty_answer_has_an_empty_message() -> None:
    def answer(message: TokenizeMsg, resumed: threading.Event) -> Iterator[UserReply]:
        yield Accepted(uid=message.uid, num_prompt_tokens=1, sampling=message.sampling)
        yield Finished(uid=message.uid, reason="stop", num_prompt_tokens=1, num_output_tokens=1)

    with ScriptedServer(answer=answer) as server:
        body = {"model": MODEL, "input": "a"}
        whole = httpx.post(f"{server.url}{PATH}", json=body).json()
        streamed = httpx.post(f"{server.url}{PATH}", json=body | {"stream": True}).text
    *_, last = (line for line in streamed.splitlines() if line.startswith("data: "))
    for response in (whole, json.loads(last.removeprefix("data: "))["response"]):
        (item,) = response["output"]
        assert (item["type"], item["content"][0]["text"]) == ("message", "")
