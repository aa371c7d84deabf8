"""What the API process keeps of open requests, and what clients see when another engine goes on."""

from __future__ import annotations

import asyncio
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from helpers.engine_replies import Queue, accepted, ending, read, text
from minisgl.core import Failed, SamplingParams
from minisgl.errors import EngineError, OutOfDeviceMemory, StartupFailed, WorkerDied
from minisgl.message import (
    AbortMsg,
    ChatPrompt,
    Prompt,
    PromptToken,
    RequestReply,
    TextPrompt,
    TokenizeMsg,
    ids_from_bytes,
    ids_to_bytes,
)
from minisgl.server.call import Call
from minisgl.server.clients import Origin
from minisgl.utils.zmq import Endpoints
from minisgl_gateway import resume
from minisgl_gateway.keys.ring import KeyRing
from minisgl_gateway.restart import Restarting, RestartingServer
from minisgl_gateway.resume import EndedTwice, ResumingFrontend

DIED = WorkerDied("engine", -9)
PROMPT = TextPrompt(text="once")
CHAT = ChatPrompt(messages=[{"role": "user", "content": "hi"}])


class Engines:
    """A frontend, and the tokenizer of its first and of later engines. Mutable."""

    def __init__(self) -> None:
        self.queue = Queue()
        self.frontend = ResumingFrontend([self.queue], Queue())
        self.frontend.info = {"context_length": 100}

    def submit(self, *prompts: Prompt, num_choices: int = 1, **fields: Any) -> Call:
        return self.frontend.submit(
            prompts, SamplingParams(**fields), origin=Origin(), num_choices=num_choices
        )

    def reply(self, *replies: RequestReply) -> None:
        for reply in replies:
            self.frontend._deliver(reply, 0.0)

    def pause(self) -> None:
        self.frontend.pause(DIED, Restarting(DIED, 1.0))

    def resume(self, context_length: int = 100) -> list[TokenizeMsg]:
        """Return what another engine gets."""
        self.queue = Queue()
        self.frontend.reconnect([self.queue], Queue(), {"context_length": context_length})
        self.frontend.resume()
        return list(self.queue.sent)


@pytest.fixture
def engines() -> Engines:
    return Engines()


def test_another_engine_gets_the_output_and_the_same_seed(engines: Engines) -> None:
    call = engines.submit(PROMPT, temperature=1.0)
    (first,) = engines.queue.sent
    assert first.sampling.seed is not None  # the API process has drawn it
    assert first.output is None
    engines.reply(accepted(0, first), text(0, "upon ", 7, 8), text(0, "a ", 9))
    engines.pause()
    (again,) = engines.resume(context_length=40)
    assert (again.uid, again.prompt, again.context_length) == (0, PROMPT, 40)
    assert again.sampling == msgspec.structs.replace(first.sampling, max_tokens=50)
    assert again.is_clamped  # it named no limit, and the new pool may be smaller
    assert ids_from_bytes(again.output).tolist() == [7, 8, 9]
    engines.reply(accepted(0, again), text(0, "time", 10), ending(0, 4), ending(0, 4))
    written, (end,), error = read(call)
    assert (written, error) == ("upon a time", "")
    assert (end.num_output_tokens, end.num_resumed, end.queued_s) == (4, 1, 1)
    assert end.decode_s > 1  # with the time before
    assert call.num_prompt_tokens == 3
    assert engines.frontend._num_bytes == 0


@pytest.mark.needs("minisgl_zoo")
def test_an_embedding_is_computed_by_the_other_engine(engines: Engines) -> None:
    call = engines.submit(PROMPT, pooling="mean")
    (first,) = engines.queue.sent
    engines.reply(accepted(0, first, most=0))
    engines.pause()
    (again,) = engines.resume()
    assert (again.sampling, again.output) == (first.sampling, b"")
    engines.reply(accepted(0, again, most=0), msgspec.structs.replace(ending(0, 0), pooled=b"abcd"))
    _, (end,), _ = read(call)
    assert (end.pooled, end.num_resumed) == (b"abcd", 1)


def test_a_request_that_was_not_accepted_begins_anew(engines: Engines) -> None:
    call = engines.submit(PROMPT, max_tokens=9)
    engines.pause()
    (again,) = engines.resume()
    assert (again.output, again.ids, again.is_clamped) == (b"", b"", False)
    engines.reply(accepted(0, again, 9), text(0, "a", 7), ending(0, 1))
    _, (end,), _ = read(call)
    assert end.queued_s > 1
    assert end.decode_s == 1


def test_the_ids_of_a_chat_are_kept(engines: Engines) -> None:
    """Its template may write another day when it is rendered again."""
    call = engines.submit(CHAT)
    (first,) = engines.queue.sent
    assert first.returns_ids
    engines.reply(accepted(0, first))
    assert call.prompt_ids == {}  # nobody has asked for them
    engines.pause()
    (again,) = engines.resume()
    assert ids_from_bytes(again.ids).tolist() == [4, 5, 6]


def test_only_choices_that_have_not_ended_go_on(engines: Engines) -> None:
    call = engines.submit(PROMPT, PROMPT, num_choices=2, seed=5)
    for message in engines.queue.sent:
        engines.reply(accepted(message.uid, message))
    engines.reply(text(0, "a", 7), ending(0, 1), text(1, "b", 8))
    engines.pause()
    (again,) = engines.resume()
    assert (again.uid, again.sampling.seed) == (1, 6)
    engines.reply(accepted(1, again), text(1, "c", 9), ending(1, 2))
    written, ends, _ = read(call)
    assert written == "abc"
    assert [end.num_resumed for end in ends] == [0, 1]


def test_a_client_that_leaves_during_the_pause(engines: Engines) -> None:
    call, _ = engines.submit(PROMPT), engines.submit(PROMPT)
    engines.pause()
    call.abort()
    assert not any(isinstance(message, AbortMsg) for message in engines.queue.sent)
    assert [again.uid for again in engines.resume()] == [1]
    assert engines.frontend.num_open == 1


def test_new_requests_wait_during_the_pause(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are new to the next engine, whose limits count them. Without room they are refused."""
    engines.pause()
    call = engines.submit(PROMPT)
    monkeypatch.setattr(resume, "MAX_KEPT_BYTES", len(msgspec.msgpack.encode(PROMPT)))
    with pytest.raises(Restarting):
        engines.submit(PROMPT)
    assert engines.queue.sent == []
    (sent,) = engines.resume(context_length=40)
    assert (sent.prompt, sent.output, sent.context_length) == (PROMPT, None, 40)
    engines.reply(accepted(0, sent), text(0, "a", 7), ending(0, 1))
    written, (end,), _ = read(call)
    assert (written, end.num_resumed) == ("a", 0)
    engines.submit(PROMPT)


def test_a_request_that_waited_goes_on_as_others_do(engines: Engines) -> None:
    engines.pause()
    call = engines.submit(PROMPT)
    (sent,) = engines.resume()
    assert engines.frontend.num_sent == 1
    engines.reply(accepted(0, sent), text(0, "a", 7))
    engines.pause()
    (again,) = engines.resume()
    assert ids_from_bytes(again.output).tolist() == [7]
    engines.reply(accepted(0, again), text(0, "b", 8), ending(0, 2))
    written, (end,), _ = read(call)
    assert (written, end.num_resumed) == ("ab", 1)


def test_when_the_server_ends_nothing_waits_any_more(engines: Engines) -> None:
    engines.pause()
    call = engines.submit(PROMPT)
    engines.frontend.fail_all(DIED)
    assert read(call)[2] == WorkerDied.__name__
    with pytest.raises(WorkerDied):
        engines.submit(PROMPT)


def test_a_request_goes_on_once(engines: Engines) -> None:
    """It may be what ends the engines. Requests that came later go on."""
    poison = engines.submit(PROMPT)
    engines.pause()
    engines.resume()
    later = engines.submit(PROMPT)
    engines.pause()
    assert [again.uid for again in engines.resume()] == [1]
    assert read(poison)[2] == EndedTwice.__name__
    assert read(later)[2] == ""


def test_a_planned_end_is_no_request_s_fault(engines: Engines) -> None:
    """An upgrade ends the engine of requests that an engine's death has moved already."""
    call = engines.submit(PROMPT)
    engines.pause()
    engines.resume()
    engines.frontend.pause(DIED, Restarting(DIED, 1.0), is_planned=True)
    assert [again.uid for again in engines.resume()] == [0]
    assert read(call)[2] == ""


def test_a_prompt_that_is_too_large_to_be_kept_ends(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resume, "MAX_KEPT_BYTES", 2 * len(msgspec.msgpack.encode(PROMPT)))
    small = engines.submit(PROMPT, PROMPT, num_choices=2)
    large = engines.submit(TextPrompt(text="once" * 9))
    engines.pause()
    assert [again.uid for again in engines.resume()] == [0, 1]
    assert (read(small)[2], read(large)[2]) == ("", WorkerDied.__name__)


def half_shown(engines: Engines) -> tuple[Call, list[PromptToken], Any]:
    """A prompt of three tokens, of which two were shown before its engine ended. Returns the call,
    the tokens, and the message to the next engine."""
    tokens = [PromptToken(id=n, data=b"p", offset=n, logprob=-1.0) for n in range(3)]
    call = engines.submit(PROMPT, echo=True, prompt_logprobs=0)
    (first,) = engines.queue.sent
    engines.reply(accepted(0, first), text(0, "ppp", prompt=tokens[:2]))
    engines.pause()
    (again,) = engines.resume()
    return call, tokens, again


def test_a_prompt_that_is_shown_comes_once(engines: Engines) -> None:
    """Its text and some of its tokens came before any output, so it is scored again."""
    call, tokens, again = half_shown(engines)
    assert again.output == b""
    engines.reply(accepted(0, again), text(0, "ppp", prompt=tokens[:1]))
    engines.reply(text(0, "", prompt=tokens[1:2]), text(0, "a", 7, prompt=tokens[2:]))
    engines.reply(text(0, "b", 8), ending(0, 2))
    assert [each for _, reply in call._pending for each in getattr(reply, "prompt", ())] == tokens
    assert read(call)[0] == "pppab"


def test_a_prompt_that_is_shown_again_may_come_with_the_first_token(engines: Engines) -> None:
    call, tokens, again = half_shown(engines)
    engines.reply(accepted(0, again), text(0, "pppa", 7, prompt=tokens), ending(0, 1))
    assert [each for _, reply in call._pending for each in getattr(reply, "prompt", ())] == tokens
    assert read(call)[0] == "pppa"


def test_a_key_owes_nothing_for_what_was_refused_or_has_ended(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    (key,) = KeyRing("secret", None)
    fields = ([PROMPT], SamplingParams(max_tokens=9), 0, Origin(key=key))
    engines.frontend.submit(*fields)
    (first,) = engines.queue.sent
    failed = Failed.of(0, OutOfDeviceMemory("none"))
    engines.reply(accepted(0, first), text(0, "a", 7), failed)
    again = engines.queue.sent[-1]
    engines.reply(accepted(again.uid, again), text(again.uid, "b", 8), ending(again.uid, 2))
    assert (key.num_prompt_tokens, key.num_output_tokens, key._share.tags) == (3, 2, [])
    engines.pause()
    monkeypatch.setattr(resume, "MAX_KEPT_BYTES", 0)
    with pytest.raises(Restarting):
        engines.frontend.submit(*fields)
    assert not key._share.tags


def test_an_error_of_the_other_engine_ends_the_request(engines: Engines) -> None:
    call = engines.submit(PROMPT)
    engines.pause()
    engines.resume()
    engines.reply(Failed(uid=0, message="no room", code="engine_error", status=500))
    assert read(call)[2] == "EngineError"
    assert engines.frontend.num_open == 0


def test_a_request_whose_step_found_no_memory_is_tried_again(engines: Engines) -> None:
    """By another uid: the engine may still have a step of the first. The second time it fails."""
    call, other = engines.submit(PROMPT, PROMPT, num_choices=2, seed=1), engines.submit(PROMPT)
    for message in list(engines.queue.sent):
        engines.reply(accepted(message.uid, message))
    failed = Failed.of(1, OutOfDeviceMemory("none"))
    engines.reply(text(1, "a", 7), failed)
    again = engines.queue.sent[-1]
    assert (again.uid, again.sampling.seed, again.output) == (3, 2, ids_to_bytes([7]))
    engines.reply(accepted(3, again), text(3, "b", 8), ending(3, 2), ending(0, 5))
    written, ends, error = read(call)
    assert (written, [end.num_resumed for end in ends], error) == ("ab", [1, 0], "")
    engines.reply(msgspec.structs.replace(failed, uid=2))
    assert engines.queue.sent[-1].uid == 4
    engines.reply(msgspec.structs.replace(failed, uid=4))
    assert read(other)[2] == OutOfDeviceMemory.__name__
    assert engines.frontend.num_open == engines.frontend.observer.num_open == 0


@pytest.mark.parametrize(
    ("lacks", "says"),
    [
        ("processes", "temporarily unavailable"),
        ("weights", "damaged"),
        ("folder of the sockets", "gone/api: No such file"),
    ],
)
def test_a_restart_that_fails_ends_the_server(
    engines: Engines, lacks: str, says: str, tmp_path: Path
) -> None:
    """Requests would wait for ever for an engine that nobody starts."""

    def start_workers() -> None:
        if lacks == "processes":
            raise BlockingIOError(11, "Resource temporarily unavailable")

    def wait_ready() -> None:
        if lacks == "weights":
            raise StartupFailed("the engine: model.safetensors is damaged")

    call = engines.submit(PROMPT)
    engines.pause()
    workers = SimpleNamespace(
        end=lambda reason: None,
        reset=lambda: None,
        wait_ready=wait_ready,
        endpoints=Endpoints(folder=tmp_path / "gone"),
    )
    server = object.__new__(RestartingServer)
    vars(server).update(
        _frontend=engines.frontend,
        _http=SimpleNamespace(should_exit=False),
        _workers=workers,
        _start_workers=start_workers,
        _num_tokenizers=1,
    )

    async def restart() -> None:
        server._loop = asyncio.get_running_loop()
        await server._bring_up(DIED)

    asyncio.run(restart())
    assert server._http.should_exit
    with pytest.raises(EngineError, match=rf"it did not start again: .*{says}"):
        asyncio.run(call.accepted())


def test_two_workers_that_die_at_once_are_one_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[EngineError] = []

    async def start_again(server: RestartingServer, error: EngineError) -> None:
        started.append(error)

    monkeypatch.setattr(RestartingServer, "_start_again", start_again)
    server = object.__new__(RestartingServer)
    vars(server).update(
        _frontend=SimpleNamespace(is_draining=False),
        _http=SimpleNamespace(should_exit=False),
        _restart=None,
        _restarts=deque(),
        _max_restarts=3,
    )

    async def die(*errors: EngineError) -> None:
        for error in errors:
            server._fail(error)
        assert server._restart
        await server._restart

    asyncio.run(die(DIED, WorkerDied("detokenizer", -9)))
    asyncio.run(die(DIED))
    assert (started, len(server._restarts)) == ([DIED, DIED], 2)
