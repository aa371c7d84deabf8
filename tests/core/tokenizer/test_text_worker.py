"""The text processes over real sockets: both layouts, bad messages, and their end."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import zmq

from helpers.text_checkpoints import make
from minisgl.core import Accepted, Failed, Finished, SamplingParams, Token
from minisgl.message import (
    AbortMsg,
    ChatPrompt,
    DetokenizeMsg,
    PingMsg,
    SchedulerMsg,
    StopMsg,
    TextPrompt,
    TextReply,
    TokenizeMsg,
    UserMsg,
    ids_from_bytes,
)
from minisgl.message.frontend import PongMsg, UserReply
from minisgl.tokenizer import load_tokenizer
from minisgl.tokenizer.worker import TextWorkerConfig, tokenize_worker
from minisgl.utils.process import Ready, StartFailed, receive_status, run_worker
from minisgl.utils.zmq import Endpoints, PullQueue, PushQueue

SAMPLING = SamplingParams(max_tokens=100, seed=1, stop=("END",))


class Server:
    """The text workers of a server, between a client and a scheduler that the test plays."""

    def __init__(self, folder: Path, num_tokenizers: int) -> None:
        self.endpoints = Endpoints.create()
        self.api: PullQueue[UserReply] = PullQueue(self.endpoints.api, UserReply)
        self.scheduler: PullQueue[SchedulerMsg] = PullQueue(self.endpoints.scheduler, SchedulerMsg)
        self.processes: list[Any] = []
        roles: list[tuple[int | None, bool]] = [(i, False) for i in range(num_tokenizers)]
        roles = [*roles, (None, True)] if num_tokenizers else [(0, True)]
        statuses = []
        context = multiprocessing.get_context("spawn")
        for index, detokenizer in roles:
            config = TextWorkerConfig(
                folder=folder,
                endpoints=self.endpoints,
                tokenizer_index=index,
                detokenizer=detokenizer,
            )
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=run_worker, args=("text", theirs, partial(tokenize_worker, config), 0.0)
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            statuses.append(ours)
        self.statuses = [receive_status(connection) for connection in statuses]
        self.to_tokenizers = [
            PushQueue(self.endpoints.tokenizer(i)) for i in range(max(num_tokenizers, 1))
        ]
        self.to_detokenizer = PushQueue(self.endpoints.detokenizer)

    def close(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.join(60)
            if process.is_alive():
                process.kill()
        for push in (*self.to_tokenizers, self.to_detokenizer):
            push.close()
        self.api.close()
        self.scheduler.close()
        self.endpoints.remove()


def _collect(queue: PullQueue[Any], enough: Callable[[list[Any]], bool]) -> list[Any]:
    got: list[Any] = []
    deadline = time.monotonic() + 60
    while not enough(got):
        assert time.monotonic() < deadline, f"only {got} arrived"
        got += queue.get(0.2)
    return got


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    path: Path = tmp_path_factory.mktemp("checkpoint")
    return make(path, "byte_level", config={"chat_template": template})


@pytest.fixture(scope="module", params=[0, 2], ids=["one process", "two tokenizers"])
def server(request: Any, folder: Path) -> Iterator[Server]:
    server = Server(folder, request.param)
    yield server
    server.close()
    assert [process.exitcode for process in server.processes] == [0] * len(server.processes)


def test_ready(server: Server) -> None:
    """Those that encode prompts load the template."""
    tokenizer, *others = server.statuses
    assert tokenizer == Ready(info={"has_chat_template": True})
    assert others == ([tokenizer, Ready(info={})] if others else [])


def test_a_request_passes_both_ways(server: Server, folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    for uid, to_tokenizer in enumerate(server.to_tokenizers):
        chat = ChatPrompt(messages=[{"role": "user", "content": "Hello"}])
        to_tokenizer.put([TokenizeMsg(uid=uid, prompt=chat, sampling=SAMPLING)])
        [message] = _collect(server.scheduler, bool)
        assert isinstance(message, UserMsg)
        assert message.uid == uid
        assert message.sampling == SAMPLING
        ids = tokenizer.encode("Hello", add_special_tokens=False)
        assert ids_from_bytes(message.ids).tolist() == ids

        out = tokenizer.encode("Grüße 🦜 END more", add_special_tokens=False)
        accepted = Accepted(uid=uid, num_prompt_tokens=len(ids), sampling=SAMPLING)
        server.to_detokenizer.put([DetokenizeMsg(events=[accepted])])
        for token in out:
            server.to_detokenizer.put([DetokenizeMsg(events=[Token(uid=uid, id=token)])])
        [stop] = _collect(server.scheduler, bool)
        assert isinstance(stop, StopMsg)
        finished = Finished(
            uid=uid, reason="stop", num_prompt_tokens=3, num_output_tokens=stop.num_tokens
        )
        server.to_detokenizer.put([DetokenizeMsg(events=[finished])])
        replies = _collect(server.api, lambda got: bool(got) and isinstance(got[-1], Finished))
        assert isinstance(replies[0], Accepted)
        text = "".join(r.text for r in replies if isinstance(r, TextReply))
        assert text == "Grüße 🦜 "
        assert replies[-1].stop_match == "END"


def test_abort_and_ping_pass_through(server: Server) -> None:
    server.to_tokenizers[0].put([AbortMsg(uid=4), PingMsg(seq=8)])
    got = _collect(server.scheduler, lambda got: len(got) == 2)
    assert got == [AbortMsg(uid=4), PingMsg(seq=8)]
    server.to_detokenizer.put([DetokenizeMsg(events=[], pings=[8, 9])])
    pongs = _collect(server.api, lambda got: len(got) == 2)
    assert pongs == [PongMsg(seq=8), PongMsg(seq=9)]


def test_an_abort_takes_back_a_prompt_that_still_waits(server: Server) -> None:
    """In one frame, so that all of it waits together; the abort of another request cuts in."""

    def prompt(uid: int) -> TokenizeMsg:
        return TokenizeMsg(uid=uid, prompt=TextPrompt(text="a"), sampling=SAMPLING)

    server.to_tokenizers[0].put(
        [prompt(20), prompt(22), AbortMsg(uid=22), AbortMsg(uid=18), PingMsg(seq=1)]
    )
    got = _collect(server.scheduler, lambda got: got[-1:] == [PingMsg(seq=1)])
    assert got[0] == AbortMsg(uid=18)
    assert [type(message) for message in got[1:]] == [UserMsg, PingMsg]
    assert got[1].uid == 20


@pytest.mark.needs("minisgl_zoo")
def test_a_prompt_does_not_wait_for_a_grammar(server: Server) -> None:
    """The check of these patterns is ended after 0.3 s of CPU time."""
    texts = [f".*{c}.*{c}.*" for c in "abcdefghijklmnop"]
    schema = {"allOf": [{"type": "string", "pattern": text} for text in texts]}
    hostile = SamplingParams(structured_outputs={"json": schema})
    text, grammar = TextPrompt(text="a"), SamplingParams(structured_outputs={"regex": "a+"})
    server.to_tokenizers[0].put(
        [
            TokenizeMsg(uid=30, prompt=text, sampling=hostile),
            TokenizeMsg(uid=32, prompt=text, sampling=grammar),
            TokenizeMsg(uid=34, prompt=text, sampling=SAMPLING),
        ]
    )
    plain, with_grammar = _collect(server.scheduler, lambda got: len(got) == 2)
    assert (plain.uid, plain.grammar) == (34, "")
    assert with_grammar.uid == 32
    assert with_grammar.grammar
    [refusal] = _collect(server.api, bool)
    assert isinstance(refusal, Failed)
    assert (refusal.uid, refusal.param) == (30, "structured_outputs.json")


@pytest.mark.needs("minisgl_zoo")
def test_bad_requests_do_not_reach_the_scheduler(server: Server) -> None:
    bad = ChatPrompt(messages=[{"role": "user", "content": 5}])
    server.to_tokenizers[0].put(
        [
            TokenizeMsg(uid=1, prompt=bad, sampling=SAMPLING),
            TokenizeMsg(uid=2, prompt=TextPrompt(text="good"), sampling=SAMPLING),
        ]
    )
    [reply] = _collect(server.api, bool)
    assert isinstance(reply, Failed)
    assert (reply.uid, reply.status, reply.param) == (1, 400, "messages[0].content")
    [message] = _collect(server.scheduler, bool)
    assert message.uid == 2


@pytest.mark.needs("minisgl_zoo")
def test_frames_that_are_not_records_are_dropped(server: Server) -> None:
    context = zmq.Context()
    for address in (server.endpoints.tokenizer(0), server.endpoints.detokenizer):
        raw = context.socket(zmq.PUSH)
        raw.connect(address)
        for frame in (b"", b"garbage", msgspec.msgpack.encode([{"type": "TokenizeMsg"}])):
            raw.send(frame)
        raw.close(linger=1000)
    context.term()
    refusal = Failed(uid=3, message="m", code="c", status=400)
    server.to_detokenizer.put([DetokenizeMsg(events=[refusal])])
    server.to_tokenizers[0].put([PingMsg(seq=1)])
    assert _collect(server.api, bool) == [Failed(uid=3, message="m", code="c", status=400)]
    assert _collect(server.scheduler, bool) == [PingMsg(seq=1)]


def test_an_idle_worker_uses_no_cpu_time(server: Server) -> None:
    processes = [psutil.Process(process.pid) for process in server.processes]
    before = [sum(process.cpu_times()[:2]) for process in processes]
    time.sleep(1.0)
    for process, start in zip(processes, before, strict=True):
        assert (
            sum(process.cpu_times()[:2]) - start <= 0.25
        )  # seconds; 0.01 here, and 1.0 when it polls


def test_sigterm_ends_a_worker_at_once(folder: Path) -> None:
    """Just when it begins to wait: the moment at which a signal is easily missed."""
    for _ in range(3):
        server = Server(folder, 0)
        server.close()
        assert server.processes[0].exitcode == 0  # not killed


@pytest.mark.needs("minisgl_zoo")
def test_a_checkpoint_without_tokenizer(tmp_path: Path) -> None:
    server = Server(tmp_path, 0)
    server.processes[0].join(60)
    server.close()
    [status] = server.statuses
    assert isinstance(status, StartFailed)
    assert "has no tokenizer: neither" in status.message
    assert server.processes[0].exitcode == 1
