"""Answers of /v1/responses that are kept: conversations and items by id, the store's bounds."""

from __future__ import annotations

from typing import Any

import msgspec
import openai
import pytest

from helpers.api_requests import TOOL, messages_of
from helpers.scripted_server import MODEL, ScriptedServer
from minisgl.errors import InvalidRequest
from minisgl.server.api.messages import Message
from minisgl_gateway.responses.store import ResponseStore


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
    with pytest.raises(openai.BadRequestError, match="stream is supported only as false"):
        client.responses.retrieve(first.id, stream=True)
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


class Answered(msgspec.Struct):
    """What the store reads of an answer, or of an item."""

    id: str
    output: list[Answered] = []


def answer(id: str, *items: Answered) -> Any:
    return Answered(id, list(items))


def test_a_read_keeps_an_answer_and_a_deleted_one_makes_room() -> None:
    message = Message(role="user", content="x")
    store = ResponseStore(max_bytes=2 * len(msgspec.json.encode([[message], answer("a")])))
    for name in ("a", "b"):
        store.put("alice", [message], answer(name))
    store.get("a", "alice")
    store.put("alice", [message], answer("c"))
    assert sorted(store._kept) == ["a", "c"]
    store.delete("c", "alice")
    store.put("alice", [message], answer("d"))
    assert sorted(store._kept) == ["a", "d"]


def test_the_store_is_bounded_and_keeps_owners_apart() -> None:
    message = Message(role="user", content="x" * 300)
    most = int(4.5 * len(msgspec.json.encode([[message], answer("r19")])))
    store = ResponseStore(max_bytes=most)
    for i in range(20):
        store.put("alice", [message], answer(f"r{i}"))
    kept = [i for i in range(20) if store._kept.get(f"r{i}")]
    assert kept == list(range(20 - len(kept), 20))
    assert 1 < len(kept) < 6
    held = sum(each.num_bytes for each in store._kept.values())
    assert store._num_bytes.total() == held <= most
    store.put("alice", [message] * 20, answer("large"))
    with pytest.raises(InvalidRequest):
        store.get("large", "alice")
    with pytest.raises(InvalidRequest):
        store.get("r19", "bob")
    item = Answered("item")
    store.put("alice", [], answer("with", item))
    assert store.item("item", "alice", "input[0].id") is item
    with pytest.raises(InvalidRequest, match="there is no item"):
        store.item("item", "bob", "input[0].id")
    store.delete("with", "alice")
    assert not store._answer_of
    store.get(f"r{kept[0]}", "alice")
    store.put("alice", [message], answer("new"))
    assert store.get(f"r{kept[0]}", "alice").messages == [message]
    with pytest.raises(InvalidRequest):
        store.get(f"r{kept[1]}", "alice")


def test_a_key_pushes_out_its_own_answers_only() -> None:
    message = Message(role="user", content="x")
    store = ResponseStore(max_bytes=4 * len(msgspec.json.encode([[message], answer("third")])))
    store.put("bob", [message], answer("hers"))
    for name in "abcdef":
        store.put("alice", [message], answer(name))
    assert sorted(store._kept) == ["d", "e", "f", "hers"]
    store.put("carol", [message], answer("third"))
    assert sorted(store._kept) == ["e", "f", "hers", "third"]
    for name in list(store._kept):
        store._drop(name)
    assert (store._used, store._num_bytes) == ({}, {})
