"""Tools in /v1/responses: namespaces, hosted and custom tools, calls as items."""

from __future__ import annotations

from typing import Any

import msgspec
import openai

from helpers.api_requests import CUSTOM_TOOL, TOOL, messages_of
from helpers.scripted_server import MODEL, ScriptedServer
from minisgl.message import ChatPrompt


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
        {**CUSTOM_TOOL, "format": grammar},
        {"type": "namespace", "name": "n", "description": "", "tools": [CUSTOM_TOOL]},
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
