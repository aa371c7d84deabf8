"""A router before servers with scripted pipelines: where requests go, and what passes."""

from __future__ import annotations

import json

import httpx
import openai

from helpers.routing import Setup, complete
from helpers.scripted_server import MODEL
from helpers.waiting import until
from minisgl_gateway.router.upstream import MAX_UNREAD


def test_official_client_streams_and_lists(two: Setup) -> None:
    client = openai.OpenAI(base_url=f"{two.url}/v1", api_key="none", max_retries=0)
    chat = [{"role": "user", "content": "one two three"}]
    answer = client.chat.completions.create(model=MODEL, messages=chat)
    assert answer.choices[0].message.content == "one two three ."
    stream = client.chat.completions.create(model=MODEL, messages=chat, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text == "one two three ."
    assert next(model.id for model in client.models.list()) == MODEL


def test_other_api_families_pass(two: Setup) -> None:
    message = [{"role": "user", "content": "one two"}]
    asked = {"model": MODEL, "messages": message, "max_tokens": 9}
    anthropic = httpx.post(f"{two.url}/v1/messages", json=asked).json()
    assert anthropic["content"][0]["text"] == "one two ."
    with httpx.stream("POST", f"{two.url}/api/chat", json=asked | {"max_tokens": 9}) as refused:
        refused.read()
        assert refused.status_code == 400
        assert "max_tokens" in refused.json()["error"], "a refusal of the replica, in Ollama's form"
    ollama = httpx.post(f"{two.url}/api/chat", json={"model": MODEL, "messages": message})
    lines = [json.loads(line) for line in ollama.text.splitlines()]
    assert "".join(line["message"]["content"] for line in lines) == "one two ."
    assert httpx.get(f"{two.url}/nowhere").status_code == 404
    assert httpx.head(f"{two.url}/v1/models").status_code == 200


def test_a_prompt_goes_to_its_prefix_and_another_to_the_shorter_queue(two: Setup) -> None:
    first = complete(two.url, "a bb ccc dddd")
    assert first.headers["x-minisgl-replica"] == two.name(0)
    two.set_state(1, num_running=1)
    # Every word's length is its id: the same lengths are the same prompt.
    view = two.router.fleet.replicas[0].view
    until(lambda: not view.sent)  # a state that was asked for later takes its place
    two.set_state(0, queued_tokens=1000)
    assert complete(two.url, "x yy zzz").headers["x-minisgl-replica"] == two.name(1)


def test_a_session_sticks_before_the_next_state(two: Setup) -> None:
    words = " ".join("x" * (1 + n % 7) for n in range(200))
    names = [
        complete(two.url, words + " more" * turn).headers["x-minisgl-replica"] for turn in range(4)
    ]
    assert len(set(names)) == 1
    assert two.served_by(words) == [two.name(0), two.name(1)].index(names[0])


def test_an_event_longer_than_the_buffer_arrives(two: Setup) -> None:
    word = "x" * 2 * MAX_UNREAD
    body = {"model": MODEL, "prompt": f"{word} end", "stream": True}
    answer = httpx.post(f"{two.url}/v1/completions", json=body, timeout=20)
    assert f'"text":"{word} "' in answer.text
    assert answer.text.endswith("data: [DONE]\n\n")


def test_metrics_of_replicas_have_a_label(two: Setup) -> None:
    complete(two.url, "one two")
    told = f'minisgl_router_requests_total{{replica="{two.name(0)}",result="answered"}} 1.0'
    until(lambda: told in httpx.get(f"{two.url}/metrics").text)
    page = httpx.get(f"{two.url}/metrics").text
    for index in range(2):
        assert f'minisgl_requests_open{{replica="{two.name(index)}"}} 0.0' in page
        assert f'minisgl_replica_up{{replica="{two.name(index)}"}} 1.0' in page
    assert page.count("# TYPE minisgl_requests_open gauge") == 1


def test_a_stored_response_is_found(two: Setup) -> None:
    client = openai.OpenAI(base_url=f"{two.url}/v1", api_key="none", max_retries=0)
    two.set_state(0, queued_tokens=1000)
    first = client.responses.create(model=MODEL, input="one two")
    assert two.served_by("one two") == 1
    two.set_state(0)
    two.set_state(1, queued_tokens=1000)
    for _ in range(2):
        assert client.responses.retrieve(first.id).output_text == "one two ."
        second = client.responses.create(model=MODEL, input="three", previous_response_id=first.id)
        assert second.output_text == "three ."
    unknown = httpx.get(f"{two.url}/v1/responses/resp_none")
    assert unknown.status_code == 404
    lost = {"model": MODEL, "input": "x", "previous_response_id": "resp_none"}
    refused = httpx.post(f"{two.url}/v1/responses", json=lost)
    assert "resp_none" in refused.json()["error"]["message"]
    replicas = two.router.fleet.replicas
    until(lambda: not any(each.upstream._open for each in replicas))


def test_an_item_of_a_stored_response_is_found(two: Setup) -> None:
    client = openai.OpenAI(base_url=f"{two.url}/v1", api_key="none", max_retries=0)
    two.set_state(0, queued_tokens=1000)
    first = client.responses.create(model=MODEL, input="one two")
    two.set_state(0)
    two.set_state(1, queued_tokens=1000)
    items = [{"type": "item_reference", "id": first.output[0].id}, {"role": "user", "content": "a"}]
    second = client.responses.create(model=MODEL, input=items)
    assert second.output_text == "a ."


def test_a_null_previous_response_id_does_not_restrict_the_choice(two: Setup) -> None:
    two.set_state(0, queued_tokens=1000)
    body = {"model": MODEL, "input": "one two", "previous_response_id": None}
    assert httpx.post(f"{two.url}/v1/responses", json=body).status_code == 200
    assert two.served_by("one two") == 1


def test_a_profile_needs_the_name_of_a_replica(two: Setup) -> None:
    refused = httpx.post(f"{two.url}/start_profile")
    assert refused.status_code == 400
    assert two.name(1) in refused.json()["error"]["message"]
