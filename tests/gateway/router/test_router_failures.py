"""Servers that fail, leave or drain, and clients that leave, as a router's clients see them."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from types import SimpleNamespace

import httpx
import msgspec
import pytest

from helpers.router_thread import RouterThread
from helpers.routing import Setup, complete, state_with
from helpers.scripted_server import MODEL, STATE, ScriptedServer
from helpers.waiting import ask_and_leave, until
from minisgl_gateway.router import fleet, upstream, waits
from minisgl_gateway.router.replica_state import ReplicaState


def test_a_replica_that_cannot_be_reached_is_passed_over() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # nothing listens
        dead = f"http://127.0.0.1:{closed.getsockname()[1]}"
        with ScriptedServer() as server, RouterThread([dead, server.url]) as router:
            assert complete(router.url, "one two").status_code == 200
            health = httpx.get(f"{router.url}/health").json()
            assert (health["replicas"], health["up"]) == (2, 1)
        with RouterThread([dead]) as router:
            answer = complete(router.url, "one two")
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

    two.router.call(lose)
    until(lambda: reasons == [("the test says so", None)])  # its cache will be empty
    until(lambda: replica.down is None)
    two.set_state(1, queued_tokens=1000)
    assert complete(two.url, "one").headers["x-minisgl-replica"] == two.name(0)


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
                elif b"GET /v1/models" in data:
                    self._whole(connection, b"{}")  # it needs no key
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
                    self._end()
                    return

    def _end(self) -> None:
        if not self._before:
            time.sleep(0.1)

    def _whole(self, connection: socket.socket, body: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        connection.sendall(head % len(body) + body)


def test_a_request_without_an_answer_is_sent_to_another_replica_once() -> None:
    breaking = Breaking(before=True)
    with ScriptedServer() as server, RouterThread([breaking.url, server.url]) as router:
        answer = complete(router.url, "one two")
        assert answer.status_code == 200
        assert (breaking.num_asked, len(server.received)) == (1, 1)
        page = httpx.get(f"{router.url}/metrics").text
        assert "minisgl_router_retries_total 1.0" in page
    breaking.close()


def test_a_request_that_two_replicas_fail_goes_to_no_third() -> None:
    breaking = [Breaking(before=True) for _ in range(2)]
    with (
        ScriptedServer() as server,
        RouterThread([*(x.url for x in breaking), server.url]) as router,
    ):
        answer = complete(router.url, "one two")
        assert answer.status_code == 502
        ends = "failed before it answered (the connection ended); try again later"
        assert answer.json()["error"]["message"].endswith(ends)
        assert ([each.num_asked for each in breaking], server.received) == ([1, 1], [])
    for each in breaking:
        each.close()


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
        until(lambda: router.fleet.replicas[0].ends["failed"] == 1)
    breaking.close()


class Stopped(Breaking):
    """A replica whose process is stopped (SIGSTOP) when it has a request: its connections stay.

    answers_questions: only this request gets no answer.
    """

    def __init__(self, *, before: bool, answers_questions: bool = False) -> None:
        self._answers_questions = answers_questions
        self._is_stopped, self.resumed = False, threading.Event()
        super().__init__(before=before)

    def close(self) -> None:
        self.resumed.set()
        super().close()

    def _whole(self, connection: socket.socket, body: bytes) -> None:
        if self._is_stopped and not self._answers_questions:
            self.resumed.wait()
        super()._whole(connection, body)

    def _end(self) -> None:
        self._is_stopped = True
        self.resumed.wait()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine answers within ASK_S; a stopped process takes SILENT_S."""
    for name, seconds in (("ASK_EVERY_S", 0.05), ("ASK_S", 2.0), ("SILENT_S", 3.0)):
        monkeypatch.setattr(fleet, name, seconds)


def test_a_request_at_a_stopped_process_goes_to_another_replica(impatient: None) -> None:
    stopped = Stopped(before=True)
    with ScriptedServer() as server, RouterThread([stopped.url, server.url]) as router:
        answer = complete(router.url, "one two")
        assert (answer.status_code, len(server.received)) == (200, 1)
        down = [each.down for each in router.fleet.replicas]
        assert down == ["no answer within 2 s", None]
        stopped.resumed.set()
        until(lambda: router.fleet.replicas[0].down is None)
    stopped.close()


def test_without_another_replica_it_ends(impatient: None) -> None:
    stopped = Stopped(before=True)
    with RouterThread([stopped.url]) as router:
        answer = complete(router.url, "one two")
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "replica_failed")
        assert "nothing came for 3 s" in answer.json()["error"]["message"]
        stopped.close()


def test_a_stream_of_a_stopped_process_ends_with_an_error_event(impatient: None) -> None:
    stopped = Stopped(before=False)
    with RouterThread([stopped.url]) as router:
        answer = httpx.post(f"{router.url}/v1/completions", json={"stream": True})
        assert b'data: {"error":{"message":"replica ' in answer.content
        assert b"nothing came for 3 s" in answer.content
        stopped.close()


def test_a_long_wait_for_the_first_token_is_no_silence(impatient: None) -> None:
    busy = Stopped(before=True, answers_questions=True)
    with RouterThread([busy.url]) as router, pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{router.url}/v1/completions", json={"stream": True}, timeout=5.0)
    busy.close()


@pytest.fixture
def asks_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("ASKED_AFTER_S", 0.1), ("LOST_S", 0.3)):
        monkeypatch.setattr(waits, name, seconds)


def test_a_request_that_the_replica_has_lost_ends(asks_soon: None) -> None:
    """The replica answers all questions, and does not name the request."""
    losing = Stopped(before=True, answers_questions=True)
    with RouterThread([losing.url]) as router:
        answer = complete(router.url, "one two")
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "replica_failed")
        assert "it says that it does not have the request" in answer.json()["error"]["message"]
    losing.close()


def test_a_request_that_a_replica_has_lost_goes_to_another_one(asks_soon: None) -> None:
    losing = Stopped(before=True, answers_questions=True)
    with ScriptedServer() as server, RouterThread([losing.url, server.url]) as router:
        answer = complete(router.url, "one two")
        assert (answer.status_code, len(server.received)) == (200, 1)
        assert losing.num_asked == 1
    losing.close()


def test_a_request_that_is_named_again_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that has begun anew with it may miss it once more, much later."""

    async def is_over(*answers: tuple[float, bool]) -> bool:
        wait = waits.Wait("a")
        with suppress(TimeoutError):
            async with wait.limit:
                for now, is_known in answers:
                    clock.monotonic = lambda now=now: now
                    wait.answered(is_known)
                return wait.limit.when() is not None
        raise AssertionError("it ended while it was asked for")

    clock = SimpleNamespace(monotonic=lambda: 0.0)
    monkeypatch.setattr(waits, "time", clock)
    later = waits.LOST_S + 1
    assert asyncio.run(is_over((0.0, False), (later, False)))
    assert not asyncio.run(is_over((0.0, False), (1.0, True), (later, False)))


def test_a_request_that_the_replica_has_may_wait(asks_soon: None, two: Setup) -> None:
    """Its answer is no stream, so it begins when it is whole."""
    answers: list[httpx.Response] = []
    asker = threading.Thread(target=lambda: answers.append(complete(two.url, "a !pause b")))
    asker.start()
    until(lambda: any(server.received for server in two.servers))
    (wait,) = (wait for each in two.router.fleet.replicas for wait in each.waits)
    asked_at = wait.ask_at
    until(lambda: wait.ask_at > asked_at + 3.0)  # it is asked for, and known, again and again
    for server in two.servers:
        server.resumed.set()
    asker.join(60)
    assert answers[0].status_code == 200
    assert not any(each.waits for each in two.router.fleet.replicas)


def test_a_request_that_has_failed_is_not_sent_again(two: Setup) -> None:
    """It may fail again, and its tokens were computed."""
    answer = complete(two.url, "one !fail")
    assert answer.json()["error"]["message"] == "out of luck"
    assert sum(len(server.received) for server in two.servers) == 1


def test_a_client_that_leaves_ends_its_request(two: Setup) -> None:
    body = {"model": MODEL, "prompt": "!forever", "stream": True}
    with httpx.stream("POST", f"{two.url}/v1/completions", json=body) as stream:
        next(stream.iter_lines())
    until(lambda: any(server.aborted for server in two.servers))
    told = f'minisgl_router_requests_total{{replica="{two.name(0)}",result="left"}} 1.0'
    until(lambda: told in httpx.get(f"{two.url}/metrics").text)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_before_the_first_token_ends_its_request(
    stream: bool, two: Setup
) -> None:
    """With the head of its answer or without."""
    body = {"model": MODEL, "prompt": "!hang", "stream": stream}
    ask_and_leave(
        f"{two.url}/v1/completions", body, lambda: any(server.received for server in two.servers)
    )
    until(lambda: any(server.aborted for server in two.servers))


def test_draining_finishes_open_requests_and_refuses_new_ones(two: Setup) -> None:
    texts = []

    def read() -> None:
        texts.append(complete(two.url, "one !pause two", stream=True).text)

    reader = threading.Thread(target=read)
    reader.start()
    until(lambda: any(server.received for server in two.servers))
    two.router.drain()
    until(lambda: httpx.get(f"{two.url}/ready").status_code == 503)
    refused = complete(two.url, "more")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    for server in two.servers:
        server.resumed.set()
    reader.join(60)
    assert texts[0].endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("drain_s", [0.3, 0.0])
def test_draining_ends_after_its_timeout(drain_s: float, caplog: pytest.LogCaptureFixture) -> None:
    """A server drains by the same function. What is open then has an error as its end."""
    caplog.set_level("INFO", "minisgl")
    refused = []
    with ScriptedServer() as server, RouterThread([server.url], drain_s=drain_s) as router:
        waiting = threading.Thread(target=lambda: refused.append(complete(router.url, "!hang")))
        waiting.start()
        until(lambda: server.received)
        body = {"model": MODEL, "prompt": "!forever", "stream": True}
        with httpx.stream("POST", f"{router.url}/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            router.drain()
            last = [line for line in lines if line][-1]
        assert router.ended.wait(30)
        waiting.join(30)
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "draining"
    assert (refused[0].status_code, refused[0].json()["error"]["code"]) == (503, "draining")
    assert ("2 requests did not finish within --drain-timeout" in caplog.text) == bool(drain_s)


def test_a_server_of_another_model_gets_no_requests() -> None:
    breaking = Breaking(before=True, model="another")
    with ScriptedServer() as server, RouterThread([server.url, breaking.url]) as router:
        reasons = [each.down for each in router.fleet.replicas if each.down]
        assert len(reasons) == 1, "whichever answered first has decided what is served"
        assert "serves 'another'" in reasons[0] or f"serves '{MODEL}'" in reasons[0]
    breaking.close()


def test_a_server_alone_may_serve_another_model_from_now_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An upgraded server is up all the time, under another name of its model."""
    models = iter(["old", "new"])

    async def state_of(*_: object) -> ReplicaState:
        return msgspec.json.decode(state_with(model=next(models)), type=ReplicaState)

    watched = fleet.Fleet(["http://127.0.0.1:9"])
    monkeypatch.setattr(watched, "_state", state_of)
    (replica,) = watched.replicas
    for model in ("old", "new"):
        asyncio.run(watched.ask(replica))
        assert (replica.down, watched.model) == (None, model)


def test_a_replica_can_be_replaced_before_all_have_answered_for_the_first_time() -> None:
    """With --dp a server may end while the router still asks another one."""
    watched = fleet.Fleet(["http://127.0.0.1:9"])

    async def replaced() -> list[str]:
        await watched.change(["http://127.0.0.1:1"])
        watched.close()
        return [replica.url for replica in watched.replicas]

    assert asyncio.run(replaced()) == ["http://127.0.0.1:1"]


def test_the_connections_to_a_removed_replica_are_closed() -> None:
    async def removed(url: str) -> tuple[int, int]:
        watched = fleet.Fleet([url])
        (replica,) = watched.replicas
        await watched.ask(replica)
        before = len(replica.upstream._idle)
        await watched.change([])
        return before, len(replica.upstream._idle)

    with ScriptedServer() as server:
        assert asyncio.run(removed(server.url)) == (1, 0)


HINTS = b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n"


async def _answer_behind(heads: bytes) -> tuple[int, dict[bytes, bytes], bytes, bool]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(heads)
        await asyncio.sleep(0.01)
        writer.write(b"HTTP/1.1 200 OK\r\nx-a: 1\r\ncontent-length: 2\r\n\r\n{}")
        await reader.read()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening:
        replica = upstream.Upstream(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}")
        answer = await replica.request("POST", "/generate", body=b"{}")
        body = await answer.whole()
        answer.close()
        replica.close()
    return answer.status, dict(answer.headers), body, answer.is_complete


@pytest.mark.parametrize("heads", [b"HTTP/1.1 100 Continue\r\n\r\n", HINTS, HINTS * 2])
def test_heads_before_the_answers_own_are_passed_over(heads: bytes) -> None:
    expected = (200, {b"x-a": b"1", b"content-length": b"2"}, b"{}", True)
    assert asyncio.run(_answer_behind(heads)) == expected


async def _late_answer() -> tuple[int, str]:
    watched = fleet.Fleet(["http://127.0.0.1:9"])
    (gone,) = watched.replicas
    watched._watches[gone] = asyncio.create_task(asyncio.sleep(0))
    await watched.change([])
    watched._found(gone, msgspec.json.decode(state_with(), type=ReplicaState), 0.0)
    return len(watched.views._index), watched.model


def test_an_answer_that_comes_after_its_replica_was_removed_changes_nothing() -> None:
    assert asyncio.run(_late_answer()) == (0, "")


CUT_CABLE = """
import asyncio, socket, subprocess
from minisgl_gateway.router import upstream

def set_cable(state):
    subprocess.run(["ip", "link", "set", "lo", state], check=True)

async def ask():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        replica = upstream.Upstream(f"http://127.0.0.1:{listening.getsockname()[1]}")
        request = asyncio.create_task(replica.request("POST", "/generate", body=b"{}"))
        connection, _ = await asyncio.to_thread(listening.accept)
        await asyncio.to_thread(connection.recv, 1000)
        set_cable("down")
        try:
            await asyncio.wait_for(request, 40)
        except upstream.ReplicaFailed as error:
            print(error)

upstream.KEEPALIVE = (1, 1, 2)
set_cable("up")
asyncio.run(ask())
"""
IN_A_NETWORK = ("unshare", "--net", "--map-root-user")


def has_networks() -> bool:
    with suppress(OSError):
        return subprocess.run([*IN_A_NETWORK, "ip", "link"], capture_output=True).returncode == 0
    return False


@pytest.mark.skipif(not has_networks(), reason="no networks of its own for a process")
def test_a_request_ends_when_the_replicas_machine_is_gone() -> None:
    code = [*IN_A_NETWORK, sys.executable, "-c", CUT_CABLE]
    done = subprocess.run(code, capture_output=True, text=True, timeout=100)
    assert "timed out" in done.stdout, done.stderr
