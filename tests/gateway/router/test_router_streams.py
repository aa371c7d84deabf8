"""A stream whose replica ends goes on at another one, and the client gets each piece once."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from helpers.router_thread import RouterThread
from helpers.routing import state_with
from helpers.scripted_server import MODEL, ScriptedServer
from helpers.waiting import until
from minisgl.core import Accepted, Failed, Finished
from minisgl.core.adapters import Adapter
from minisgl.errors import EngineError, NonFiniteLogits, WorkerDied
from minisgl.message import PromptToken, TextReply, TokenizeMsg, TokenText, ids_from_bytes
from minisgl.message.frontend import PongMsg, UserReply
from minisgl.server.errors import Draining
from minisgl.server.web.respond import Shape
from minisgl_gateway.router.streams import Stream, pieces
from minisgl_gateway.router.upstream import ReplicaFailed
from minisgl_gateway.watch.relayed import Relayed, _Router

DIED = WorkerDied("engine", -9)
NUM = 6
"""Tokens of an answer. Choice 1 ends after half of them."""
PROMPT = "echoed "


class Engine:
    """A server whose answers stop behind `most` tokens, all but those of choice 1. A silent one
    has no answers. Mutable."""

    def __init__(self, stack: ExitStack, most: int, digest: str = "same") -> None:
        self.most, self.is_there = most, threading.Event()
        self.is_silent = False
        self.server = stack.enter_context(ScriptedServer(answer=self._answer))
        self.server.state = state_with(digest=digest)

    def _answer(self, message: TokenizeMsg, resumed: threading.Event) -> Iterator[UserReply]:
        sampling, uid = message.sampling, message.uid
        if self.is_silent:
            yield from self._nothing()
        yield Accepted(uid=uid, num_prompt_tokens=2, sampling=sampling)
        done = ids_from_bytes(message.output or b"").tolist()
        most = NUM // 2 if sampling.seed == 6 else NUM
        if len(done) >= most:  # the scheduler refuses it, too: nothing is left to sample
            yield Failed(uid=uid, message="whole", code="invalid_request", status=400)
            return
        if done:
            assert message.repeats
            yield self._text(message, done, has_logprobs=False)
        elif sampling.shows_prompt:
            yield from self._prompt(uid)
        for token in range(len(done), most if sampling.max_tokens != 0 else 0):
            if token == self.most and most == NUM:
                yield from self._nothing()
            yield self._text(message, [token], has_logprobs=sampling.logprobs)
        yield Finished(uid=uid, reason="length", num_prompt_tokens=2, num_output_tokens=most)

    def _prompt(self, uid: int) -> Iterator[UserReply]:
        """Yield the text at once and the tokens one by one, half of them if the answer is to stop
        without output; an engine that does not stop yields other pieces."""
        tokens = [PromptToken(id=n, data=b"p", offset=n, logprob=-2.0) for n in range(len(PROMPT))]
        size = 1 if self.most < NUM else 3
        for first in range(0, len(PROMPT), size):
            if first == len(PROMPT) // 2 and not self.most:
                yield from self._nothing()
            text = PROMPT[first : first + size] if size > 1 else PROMPT * (not first)
            yield TextReply(uid=uid, text=text, token_ids=[], prompt=tokens[first : first + size])

    def _nothing(self) -> Iterator[UserReply]:
        while True:
            self.is_there.set()
            yield PongMsg(seq=0)

    def _text(self, message: TokenizeMsg, ids: list[int], *, has_logprobs: bool) -> TextReply:
        return TextReply(
            uid=message.uid,
            text="".join(f"w{token} " for token in ids),
            token_ids=ids,
            logprobs=[-1.0] * len(ids) if has_logprobs else None,
            tokens=[TokenText(data=b"w", offset=0) for _ in ids] if has_logprobs else (),
        )


class Pair:
    """A router before two engines, of which the first gets requests, and ends. Mutable."""

    def __init__(self, stack: ExitStack, *, most: int = 4, digest: str = "same") -> None:
        self._stack = stack
        self.first, self.second = Engine(stack, most), Engine(stack, NUM, digest)
        self.second.server.state = state_with(digest=digest, queued_tokens=10_000)

    def ask(self, path: str, error: EngineError = DIED, **fields: Any) -> list[str]:
        """Return the lines of a stream within which the first engine ends."""
        urls = [each.server.url for each in (self.first, self.second)]
        router = self._stack.enter_context(RouterThread(urls))
        until(lambda: all(each.view.state for each in router.fleet.replicas))
        lines: list[str] = []

        def read() -> None:
            body = {"stream": True, **fields}
            with httpx.stream("POST", router.url + path, json=body, timeout=60) as answer:
                lines.extend(answer.iter_lines())

        thread = threading.Thread(target=read)
        thread.start()
        assert self.first.is_there.wait(60)
        self.first.server.fail(error)
        thread.join(60)
        assert not thread.is_alive()
        return lines


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def chunks(lines: list[str]) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def words(first: int, last: int = NUM) -> str:
    return "".join(f"w{token} " for token in range(first, last))


CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


def test_a_chat_goes_on(stack: ExitStack) -> None:
    pair = Pair(stack)
    options = {"include_usage": True, "continuous_usage_stats": True}
    lines = pair.ask("/v1/chat/completions", **CHAT, logprobs=True, stream_options=options)
    found = chunks(lines)
    assert [each["choices"][0]["delta"].get("role") for each in found[:-1]].count("assistant") == 1
    deltas = [each["choices"][0]["delta"].get("content") or "" for each in found[:-1]]
    assert "".join(deltas) == words(0)
    assert len({(each["id"], each["created"]) for each in found}) == 1
    counts = [each["usage"]["completion_tokens"] for each in found[1:-2]]
    assert counts == list(range(1, NUM + 1))
    assert found[-1]["usage"]["total_tokens"] == 2 + NUM
    assert found[-1]["timings"]["resumed"] == 1
    assert lines[-2:] == ["data: [DONE]", ""]
    assert not any(line.startswith(":") for line in lines)
    (first,), (second,) = (each.server.received for each in (pair.first, pair.second))
    assert first.sampling.seed == second.sampling.seed
    assert first.output is None
    assert ids_from_bytes(second.output or b"").tolist() == [0, 1, 2, 3]


def test_a_choice_that_has_ended_ends_once(stack: ExitStack) -> None:
    found = chunks(Pair(stack).ask("/v1/completions", prompt="a", n=2, seed=5))
    texts, ends = ["", ""], [0, 0]
    for each in found:
        for choice in each["choices"]:
            texts[choice["index"]] += choice["text"]
            ends[choice["index"]] += choice["finish_reason"] is not None
    assert texts == [words(0), words(0, NUM // 2)]
    assert ends == [1, 1]


def test_a_message_goes_on(stack: ExitStack) -> None:
    found = chunks(Pair(stack).ask("/v1/messages", **CHAT, max_tokens=9))
    kinds = [each["type"] for each in found]
    assert kinds.count("message_start") == kinds.count("message_stop") == 1
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 1
    texts = [each["delta"]["text"] for each in found if each["type"] == "content_block_delta"]
    assert "".join(texts) == words(0)
    assert found[-2]["usage"]["output_tokens"] == NUM


@pytest.mark.parametrize("error", [DIED, Draining()])
def test_ids_come_once(error: EngineError, stack: ExitStack) -> None:
    found = chunks(Pair(stack).ask("/generate", text="a", error=error))
    assert [token for each in found for token in each["token_ids"]] == list(range(NUM))


@pytest.mark.parametrize("most", [0, 4])
def test_nothing_was_sent_or_all_but_the_end(most: int, stack: ExitStack) -> None:
    pair = Pair(stack, most=most)
    assert "".join(each["text"] for each in chunks(pair.ask("/generate", text="a"))) == words(0)


def test_other_weights_do_not_go_on(stack: ExitStack) -> None:
    pair = Pair(stack, digest="another")
    *_, last = chunks(pair.ask("/generate", text="a"))
    assert last["error"]["code"] == "worker_died"
    assert pair.second.server.received == []


def test_what_ends_two_replicas_is_not_tried_again(stack: ExitStack) -> None:
    pair = Pair(stack)
    pair.second.most = 5
    threading.Thread(
        target=lambda: pair.second.is_there.wait(60) and pair.second.server.fail(DIED)
    ).start()
    found = chunks(pair.ask("/generate", text="a"))
    assert "".join(each.get("text", "") for each in found) == words(0, 5)
    assert found[-1]["error"]["code"] == "worker_died"


@pytest.mark.parametrize("is_silent", [True, False])
def test_a_client_that_leaves_the_second_replica_ends_its_request(
    is_silent: bool, stack: ExitStack
) -> None:
    pair = Pair(stack)
    pair.second.most, pair.second.is_silent = 5, is_silent
    urls = [each.server.url for each in (pair.first, pair.second)]
    router = stack.enter_context(RouterThread(urls))
    until(lambda: all(each.view.state for each in router.fleet.replicas))
    body = {"stream": True, "text": "a"}
    with httpx.stream("POST", f"{router.url}/generate", json=body, timeout=60) as answer:
        assert pair.first.is_there.wait(60)
        pair.first.server.fail(DIED)
        assert pair.second.is_there.wait(60)
        assert answer.status_code == 200
    assert pair.second.server.wait_aborted(1) == [0]
    until(lambda: router.fleet.replicas[1].ends["left"] == 1)


def test_an_error_of_the_request_ends_it(stack: ExitStack) -> None:
    pair = Pair(stack)
    *_, last = chunks(pair.ask("/generate", NonFiniteLogits(), text="a"))
    assert last["error"]["code"] == "non_finite_logits"
    assert pair.second.server.received == []


@pytest.mark.parametrize("most", [0, 2])
def test_a_prompt_that_is_shown_comes_once(most: int, stack: ExitStack) -> None:
    """The first engine ends when it has shown a part of the prompt, or all and some output."""
    pair = Pair(stack, most=most)
    fields = {"prompt": "a", "echo": True, "logprobs": 1, "seed": 1}
    found = chunks(pair.ask("/v1/completions", **fields))
    choices = [choice for each in found for choice in each["choices"]]
    assert "".join(choice["text"] for choice in choices) == PROMPT + words(0)
    shown = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    logprobs = [number for each in shown for number in each["token_logprobs"]]
    assert logprobs == [-2.0] * len(PROMPT) + [-1.0] * NUM
    assert found[-1]["timings"]["resumed"] == 1


def test_a_prompt_without_output_goes_on(stack: ExitStack) -> None:
    found = chunks(Pair(stack, most=0).ask("/generate", text="a", prompt_logprobs=0, max_tokens=0))
    shown = [token["logprob"] for each in found for token in each.get("prompt_logprobs") or ()]
    assert shown == [-2.0] * len(PROMPT)


def test_a_stream_whose_first_text_is_held_back_goes_on() -> None:
    stream = Stream("/v1/completions")
    assert stream.read(b": minisgl [0,[7]]\n\n") == b""
    assert stream.goes_on()
    assert b'"outputs":{"0":[7]},"shown":{}' in stream.request(b"")


@pytest.mark.parametrize("model", [MODEL, "an-adapter"])
def test_a_stream_of_an_adapter_ends_with_its_replica(model: str, stack: ExitStack) -> None:
    """So it has no notes: the files behind an adapter's name may differ at another replica."""
    server = stack.enter_context(ScriptedServer())
    server._model.adapters["an-adapter"] = Adapter("digest", "/folder")
    line = json.dumps({"path": "/generate", "seed": 1})
    body = json.dumps({"text": "one two", "model": model, "stream": True})
    answer = httpx.post(
        f"{server.url}/replica/stream",
        content=f"{line}\n{body}",
        headers={"content-type": "application/json"},
    )
    assert "".join(each["text"] for each in chunks(answer.text.splitlines())) == "one two ."
    assert (": minisgl [" in answer.text) == (model == MODEL)


def test_parts_without_ids_are_sent() -> None:
    """What a parser held back comes at the end."""

    class Parts(Shape):
        whole: Any = None
        end: Any = None

        def text(self, index: int, reply: TextReply) -> bytes:
            return repr(reply.parts).encode()

    noted = _Router(Relayed(path="/v1/chat/completions", seed=1)).shape(Parts())
    reply = TextReply(uid=0, text="", token_ids=[], parts=[("content", "}")])
    assert noted.text(0, reply).startswith(b"[('content', '}')]")


def test_a_second_replica_that_fails_is_named_and_counted() -> None:
    class Cut:
        status, is_complete = 200, False

        def __init__(self, why: str) -> None:
            self._why = why

        async def __aiter__(self) -> AsyncIterator[bytes]:
            yield b"data: {}\n\n: minisgl [0,[5]]\n\n"
            raise ReplicaFailed(self._why)

        def close(self) -> None:
            pass

    async def ask(replica: Any) -> Any:
        return Cut("gone as well")

    async def read() -> None:
        async for _ in pieces(cast(Any, Cut("gone")), request, fleet, first):
            pass

    view = SimpleNamespace(state=SimpleNamespace(digest="same"))
    failed: list[tuple[str, str]] = []
    first: Any = SimpleNamespace(name="A", view=view)
    second: Any = SimpleNamespace(name="B", view=view, num_open=0, ends=Counter())
    fleet: Any = SimpleNamespace(
        replicas=[first, second],
        choose=lambda without: (second, 0),
        failed=lambda replica, error: failed.append((replica.name, str(error))),
    )
    stream = Stream("/generate")
    stream.digest = "same"
    request: Any = SimpleNamespace(stream=stream, ask=ask)
    with pytest.raises(ReplicaFailed, match="gone; B was to go on, and failed, too: gone as well"):
        asyncio.run(read())
    assert failed == [("A", "gone"), ("B", "gone as well")]
    assert (second.num_open, second.ends) == (0, {"failed": 1})


def test_a_stream_goes_on_once() -> None:
    stream = Stream("/generate")
    stream.request(b"")
    stream.read(b"data: {}\n\n: minisgl [0,[5]]\n\n")
    assert stream.goes_on()
    stream.request(b"")
    assert not stream.goes_on()


def test_text_that_looks_like_a_note_is_text() -> None:
    stream = Stream("/generate")
    event = b'data: {"text": "\\n: minisgl [0,[1]]\\n\\n"}\n\n'
    assert stream.goes_on()
    assert stream.read(event) == event
    assert not stream.goes_on()  # no ids were noted


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/completions", b"{}"),
        ("POST", "/v1/completions", b'{"stream": 1'),
        ("POST", "/v1/responses", b'{"stream": true}'),
        ("GET", "/v1/completions", b'{"stream": true}'),
        ("POST", "/v1/completions", b'{"stream": true}' + b" " * 2**20),
    ],
)
def test_other_requests_are_passed_on_as_they_are(method: str, path: str, body: bytes) -> None:
    assert Stream.of(method, path, body) is None
