"""A router before servers with scripted pipelines."""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import msgspec
import openai
import pytest

from helpers.router_thread import RouterThread
from helpers.scripted_server import MODEL, STATE, ScriptedServer, text_of
from minisgl.message.replica import KeyUse, ReplicaState
from minisgl.router import fleet
from minisgl.router.key_limits import KeyLimits
from minisgl.router.upstream import MAX_UNREAD
from minisgl.server.errors import RateLimited
from minisgl.server.keys import KeyRing
from minisgl.server.telemetry import replica


@pytest.fixture(autouse=True)
def _often_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "ASK_EVERY_S", 0.1)
    monkeypatch.setattr(replica, "FRESH_S", 0.0)


def _state(**fields: int) -> bytes:
    state = msgspec.json.decode(STATE, type=ReplicaState)
    return msgspec.json.encode(msgspec.structs.replace(state, **fields))


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Setup:
    """A router over two servers. Mutable."""

    def __init__(self, stack: ExitStack, *states: bytes) -> None:
        self.servers = []
        for state in states:
            server = ScriptedServer()
            server.state = state
            self.servers.append(stack.enter_context(server))
        self.router = stack.enter_context(RouterThread([each.url for each in self.servers]))
        self.url = self.router.url

    def set_state(self, index: int, **fields: int) -> None:
        """Change a server's state, and wait until the router has it."""
        self.servers[index].state = _state(**fields)
        expected = msgspec.json.decode(_state(**fields), type=ReplicaState)
        view = self.router.fleet.replicas[index].view

        def is_there() -> bool:
            names = ("queued_tokens", "num_running")
            return all(getattr(view.state, name) == getattr(expected, name) for name in names)

        until(is_there)

    def name(self, index: int) -> str:
        return self.router.fleet.replicas[index].name

    def served_by(self, text: str) -> int:
        """Return the index of the server that has received the prompt."""
        found = [
            index
            for index, server in enumerate(self.servers)
            if any(text_of(message) == text for message in server.received)
        ]
        assert len(found) == 1, found
        return found[0]


@pytest.fixture
def two() -> Iterator[Setup]:
    with ExitStack() as stack:
        yield Setup(stack, STATE, STATE)


def _complete(url: str, prompt: str, **more: object) -> httpx.Response:
    body = {"model": MODEL, "prompt": prompt, **more}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60)


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
    first = _complete(two.url, "a bb ccc dddd")
    assert first.headers["x-minisgl-replica"] == two.name(0)
    two.set_state(1, num_running=1)
    # Every word's length is its id: the same lengths are the same prompt.
    view = two.router.fleet.replicas[0].view
    until(lambda: not view.sent)  # a state that was asked for later takes its place
    two.set_state(0, queued_tokens=1000)
    assert _complete(two.url, "x yy zzz").headers["x-minisgl-replica"] == two.name(1)


def test_a_session_sticks_before_the_next_state(two: Setup) -> None:
    words = " ".join("x" * (1 + n % 7) for n in range(200))
    names = [
        _complete(two.url, words + " more" * turn).headers["x-minisgl-replica"] for turn in range(4)
    ]
    assert len(set(names)) == 1
    assert two.served_by(words) == [two.name(0), two.name(1)].index(names[0])


def test_a_replica_that_cannot_be_reached_is_passed_over() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # nothing listens
        dead = f"http://127.0.0.1:{closed.getsockname()[1]}"
        with ScriptedServer() as server, RouterThread([dead, server.url]) as router:
            assert _complete(router.url, "one two").status_code == 200
            health = httpx.get(f"{router.url}/health").json()
            assert (health["replicas"], health["up"]) == (2, 1)
        with RouterThread([dead]) as router:
            answer = _complete(router.url, "one two")
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "no_replica"
            assert "Connect" in answer.json()["error"]["message"]
            assert httpx.get(f"{router.url}/ready").status_code == 503


def test_a_replica_that_was_down_gets_requests_again(two: Setup) -> None:
    replica = two.router.fleet.replicas[0]
    reasons = []

    def lose() -> None:
        two.router.fleet.lost(replica, "the test says so")
        reasons.append((replica.down, replica.view.state))

    two.router._loop.call_soon_threadsafe(lose)
    until(lambda: reasons == [("the test says so", None)])  # its cache will be empty
    until(lambda: replica.down is None)
    two.set_state(1, queued_tokens=1000)
    assert _complete(two.url, "one").headers["x-minisgl-replica"] == two.name(0)


class Breaking:
    """A replica that ends connections of the model's endpoint. before: without a byte; else after
    one event."""

    def __init__(self, *, before: bool, model: str = MODEL) -> None:
        self._before, self._model = before, model
        self.num_asked = 0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listening.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        state = msgspec.json.decode(STATE, type=ReplicaState)
        state = msgspec.structs.replace(state, model=self._model, prefill_tokens_per_s=1e6)
        with connection, suppress(ConnectionResetError):
            while data := connection.recv(65536):
                if b"GET /replica" in data:
                    self._whole(connection, msgspec.json.encode(state))
                elif b"x-minisgl-prefix" in data:
                    hashes = b'{"num_tokens":1,"page_size":1,"hashes":""}'
                    self._whole(connection, hashes)
                else:
                    self.num_asked += 1
                    if not self._before:
                        event = b'data: {"choices":[]}\n\n'
                        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
                        connection.sendall(
                            head
                            + b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n40\r\ndata: {"
                            % (len(event), event)
                        )
                        time.sleep(0.1)
                    return

    def _whole(self, connection: socket.socket, body: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        connection.sendall(head % len(body) + body)


def test_a_request_without_an_answer_is_sent_to_another_replica_once() -> None:
    breaking = Breaking(before=True)
    with ScriptedServer() as server, RouterThread([breaking.url, server.url]) as router:
        answer = _complete(router.url, "one two")
        assert answer.status_code == 200
        assert (breaking.num_asked, len(server.received)) == (1, 1)
        page = httpx.get(f"{router.url}/metrics").text
        assert "minisgl_router_retries_total 1.0" in page
    breaking.close()


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/v1/completions", b'data: {"error":{"message":"replica '),
        ("/v1/messages", b'event: error\ndata: {"type":"error","error":{"type":"api_error"'),
        ("/v1/responses", b'event: error\ndata: {"type":"error","code":"replica_failed"'),
    ],
)
def test_a_stream_that_has_begun_ends_with_an_error_event(path: str, expected: bytes) -> None:
    breaking = Breaking(before=False)
    with RouterThread([breaking.url]) as router:
        answer = httpx.post(f"{router.url}{path}", json={"stream": True})
        first, rest = answer.content.split(b"\n\n", 1)
        assert first == b'data: {"choices":[]}'
        assert rest.startswith(expected), "behind a whole event"
        assert rest.endswith(b"}\n\n")
    breaking.close()


def test_a_client_that_leaves_ends_its_request(two: Setup) -> None:
    body = {"model": MODEL, "prompt": "!forever", "stream": True}
    with httpx.stream("POST", f"{two.url}/v1/completions", json=body) as stream:
        next(stream.iter_lines())
    until(lambda: any(server.aborted for server in two.servers))
    told = f'minisgl_router_requests_total{{replica="{two.name(0)}",result="left"}} 1.0'
    until(lambda: told in httpx.get(f"{two.url}/metrics").text)


def test_a_client_that_leaves_before_the_first_token_ends_its_request(two: Setup) -> None:
    body = {"model": MODEL, "prompt": "!hang", "stream": True}
    patience = httpx.Timeout(60, read=1.0)
    with (
        pytest.raises(httpx.ReadTimeout),
        httpx.Client(base_url=two.url, timeout=patience) as http,
    ):
        http.post("/v1/completions", json=body)
    until(lambda: any(server.aborted for server in two.servers))


def test_an_event_longer_than_the_buffer_arrives(two: Setup) -> None:
    word = "x" * 2 * MAX_UNREAD
    body = {"model": MODEL, "prompt": f"{word} end", "stream": True}
    answer = httpx.post(f"{two.url}/v1/completions", json=body, timeout=20)
    assert f'"text":"{word} "' in answer.text
    assert answer.text.endswith("data: [DONE]\n\n")


def test_metrics_of_replicas_have_a_label(two: Setup) -> None:
    _complete(two.url, "one two")
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


def test_draining_finishes_open_requests_and_refuses_new_ones(two: Setup) -> None:
    texts = []

    def read() -> None:
        texts.append(_complete(two.url, "one !pause two", stream=True).text)

    reader = threading.Thread(target=read)
    reader.start()
    until(lambda: any(server.received for server in two.servers))
    two.router.end(drain=True)
    until(lambda: httpx.get(f"{two.url}/ready").status_code == 503)
    refused = _complete(two.url, "more")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    for server in two.servers:
        server.resumed.set()
    reader.join(60)
    assert texts[0].endswith("data: [DONE]\n\n")


def test_draining_ends_after_its_timeout() -> None:
    with ScriptedServer() as server, RouterThread([server.url], drain_s=0.3) as router:
        body = {"model": MODEL, "prompt": "!forever", "stream": True}
        with httpx.stream("POST", f"{router.url}/v1/completions", json=body) as stream:
            lines = stream.iter_lines()  # its end would close the connection
            next(lines)
            router.end(drain=True)
            router._thread.join(30)
            assert not router._thread.is_alive()


def test_a_server_of_another_model_gets_no_requests() -> None:
    breaking = Breaking(before=True, model="another")
    with ScriptedServer() as server, RouterThread([server.url, breaking.url]) as router:
        reasons = [each.down for each in router.fleet.replicas if each.down]
        assert len(reasons) == 1, "whichever answered first has decided what is served"
        assert "serves 'another'" in reasons[0] or f"serves '{MODEL}'" in reasons[0]
    breaking.close()


async def _late_answer() -> tuple[int, str]:
    watched = fleet.Fleet(["http://127.0.0.1:9"])
    (gone,) = watched.replicas
    watched._watches[gone] = asyncio.create_task(asyncio.sleep(0))
    await watched.change([])
    watched._found(gone, msgspec.json.decode(_state(), type=ReplicaState), 0.0)
    return len(watched.views._index), watched.model


def test_an_answer_that_comes_after_its_replica_was_removed_changes_nothing() -> None:
    assert asyncio.run(_late_answer()) == (0, "")


def test_the_replicas_check_the_clients_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text('[a]\nkey = "client"\nrequests_per_minute = 2\n[router]\nkey = "asks"\n')
    with ExitStack() as stack:
        servers = [stack.enter_context(ScriptedServer(keys=KeyRing(None, file))) for _ in range(2)]
        urls = [server.url for server in servers]
        with RouterThread(urls) as keyless:
            assert "--api-key" in str(keyless.fleet.replicas[0].down)
        router = stack.enter_context(RouterThread(urls, key="asks"))
        assert _complete(router.url, "one").status_code == 401
        assert httpx.get(f"{router.url}/metrics").status_code == 401
        client = openai.OpenAI(base_url=f"{router.url}/v1", api_key="client", max_retries=0)
        texts = [client.completions.create(model=MODEL, prompt="a b").choices[0].text]
        texts.append(client.completions.create(model=MODEL, prompt="a b").choices[0].text)
        assert texts == ["a b ."] * 2, "asking for a prompt's hashes is not counted as a request"


def _limited(
    stack: ExitStack, path: Path, limits: str
) -> tuple[RouterThread, list[ScriptedServer]]:
    """A router over two servers with the same key file."""
    path.write_text(f'[a]\nkey = "client"\n{limits}\n[router]\nkey = "asks"\nadmin = true\n')
    rings = [KeyRing(None, str(path)) for _ in range(2)]
    servers = [stack.enter_context(ScriptedServer(keys=ring)) for ring in rings]
    urls = [server.url for server in servers]
    return stack.enter_context(RouterThread(urls, key="asks")), servers, rings


def test_requests_of_a_key_are_limited_over_all_replicas(tmp_path: Path) -> None:
    with ExitStack() as stack:
        router, servers, _ = _limited(stack, tmp_path / "keys.toml", "requests_per_minute = 3")
        client = openai.OpenAI(base_url=f"{router.url}/v1", api_key="client", max_retries=0)
        for index in range(3):
            servers[index % 2].state = _state(queued_tokens=1000)
            servers[1 - index % 2].state = STATE
            queued = [1000 * (index % 2 == 0), 1000 * (index % 2)]
            views = [each.view for each in router.fleet.replicas]
            until(lambda: [v.state and v.state.queued_tokens for v in views] == queued)  # noqa: B023  # it is waited for within the turn
            client.completions.create(model=MODEL, prompt="a b")
        assert [len(server.received) for server in servers] == [1, 2]
        with pytest.raises(openai.RateLimitError, match="its 3 requests a minute"):
            client.completions.create(model=MODEL, prompt="a b")
        with pytest.raises(openai.RateLimitError) as refused:
            client.completions.create(model=MODEL, prompt="a b")
        assert 15 < float(refused.value.response.headers["retry-after"]) <= 20
        asks = openai.OpenAI(base_url=f"{router.url}/v1", api_key="asks", max_retries=0)
        asks.completions.create(model=MODEL, prompt="a b")  # a key without limits


def test_tokens_of_a_key_are_limited_over_all_replicas(tmp_path: Path) -> None:
    with ExitStack() as stack:
        router, servers, rings = _limited(stack, tmp_path / "keys.toml", "tokens_per_minute = 20")
        headers = {"authorization": "Bearer client"}
        body = {"model": MODEL, "prompt": "a b c d e f"}
        for server in servers:  # 13 tokens of each, not by the router
            httpx.post(f"{server.url}/v1/completions", json=body, headers=headers)
        assert [next(iter(ring)).use().num_tokens for ring in rings] == [13, 13]
        limits = router.fleet.limits
        until(lambda: sum(key.seen.tokens for key in limits._keys.values()) == 26)
        client = openai.OpenAI(base_url=f"{router.url}/v1", api_key="client", max_retries=0)
        with pytest.raises(openai.RateLimitError, match="its 20 tokens a minute"):
            client.completions.create(model=MODEL, prompt="a")


def test_a_refused_prompt_costs_its_key_no_tokens(tmp_path: Path) -> None:
    patience = httpx.Timeout(60, read=1.0)
    with ExitStack() as stack:
        router, servers, _ = _limited(stack, tmp_path / "keys.toml", "tokens_per_minute = 600")
        http = httpx.Client(
            base_url=router.url, timeout=patience, headers={"authorization": "Bearer client"}
        )
        stack.enter_context(http)
        refused = http.post("/v1/completions", json={"model": MODEL, "prompt": "!refuse b c d"})
        assert refused.status_code == 400
        (key,) = router.fleet.limits._keys.values()
        assert (key.own.requests, key.own.tokens) == (1, 0)
        body = {"model": MODEL, "prompt": "!hang b c d", "stream": True}
        with pytest.raises(httpx.ReadTimeout):  # the client leaves before the first token
            http.post("/v1/completions", json=body)
        until(lambda: any(server.aborted for server in servers))
        until(lambda: sum(each.num_open for each in router.fleet.replicas) == 0)
        assert (key.own.requests, key.own.tokens) == (2, 0)


def test_requests_of_other_routers_are_counted_once() -> None:
    now = 0.0
    limits = KeyLimits(clock=lambda: now)
    digest = hashlib.sha256(b"client").hexdigest()

    def use(requests: int, tokens: int) -> KeyUse:
        return KeyUse(
            name="a", digest=digest, requests_per_minute=5, tokens_per_minute=None,
            num_requests=requests, num_tokens=tokens,
        )  # fmt: skip

    assert limits.admit("client") is None, "nothing is known of it"
    limits.update("x", [use(40, 9)])  # before this router
    limits.update("y", [])
    for _ in range(3):
        passed = limits.admit("client")
        assert passed
        passed.send(1)
    limits.update("x", [use(42, 9)])  # two of the three
    limits.update("y", [use(2, 9)])  # one of them, and one of another router
    passed = limits.admit("client")  # the fifth
    assert passed
    passed.send(1)
    with pytest.raises(RateLimited, match="its 5 requests a minute"):
        limits.admit("client")
    limits.update("y", [use(3, 9)])
    now = 12.0
    assert limits.admit("client"), "one comes back in 12 s"
    limits.update("y", [use(1, 9)])  # it was started again: another router's again
    now = 24.0
    with pytest.raises(RateLimited):
        limits.admit("client")
