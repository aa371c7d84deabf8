"""What a tokenizer works on: nobody waits for all the work of another's key."""

from __future__ import annotations

import select
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from helpers.text_checkpoints import make
from minisgl.core import Failed, SamplingParams
from minisgl.message import (
    ChatPrompt,
    KeyShare,
    PingMsg,
    Prompt,
    TextPrompt,
    TokenizeMsg,
    TokenPrompt,
    UserMsg,
    ids_to_bytes,
)
from minisgl.message.frontend import CodecReply, DecodeMsg, EncodeMsg
from minisgl.tokenizer import PromptEncoder, load_tokenizer, worker
from minisgl.tokenizer.worker import LONG, SHORT, Work

WAIT_S = 60
SAMPLING = SamplingParams(max_tokens=4, seed=1)
HEAVY, LIGHT = 1, 2


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: Any) -> PromptEncoder:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    path: Path = tmp_path_factory.mktemp("checkpoint")
    folder = make(path, "byte_level", config={"chat_template": template})
    return PromptEncoder(tokenizer=load_tokenizer(folder), folder=folder)


def message(
    uid: int, prompt: Prompt | str, key: int = 0, sampling: SamplingParams = SAMPLING, **rest: Any
) -> TokenizeMsg:
    given = TextPrompt(text=prompt) if isinstance(prompt, str) else prompt
    return TokenizeMsg(uid=uid, prompt=given, sampling=sampling, share=KeyShare(0, key), **rest)


def chat(text: str) -> ChatPrompt:
    return ChatPrompt(messages=[{"role": "user", "content": text}])


class Gate:
    """Stops the tokenizer at texts that contain "stop", until `go_on` is set."""

    def __init__(self, encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go_on = threading.Semaphore(0), threading.Event()
        encode = type(encoder.tokenizer).encode

        def stopping(tokenizer: Any, text: str, **rest: Any) -> list[int]:
            if "stop" in text:
                self.begun.release()
                assert self.go_on.wait(WAIT_S)
            return encode(tokenizer, text, **rest)

        monkeypatch.setattr(type(encoder.tokenizer), "encode", stopping)


@pytest.fixture
def gate(encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch) -> Any:
    gate = Gate(encoder, monkeypatch)
    yield gate
    gate.go_on.set()


def answers(work: Work, count: int) -> list[int]:
    """The uids, or seqs, of the next answers of the threads."""
    found: list[int] = []
    while len(found) < count:
        assert select.select([work.news], [], [], WAIT_S)[0]
        for answer in work.take():
            assert isinstance(answer, UserMsg | Failed | CodecReply)
            found.append(answer.seq if isinstance(answer, CodecReply) else answer.uid)
    return found


def steps(work: Work) -> list[Any]:
    found = []
    while work:
        work.step()
        found += work.take()
    return found


LONG_STOP = "stop" + "a" * SHORT
LONG_CHAT = chat("stop" + "a" * LONG)


@pytest.mark.needs("minisgl_gateway")
@pytest.mark.parametrize("long", [LONG_STOP, LONG_CHAT], ids=["text", "chat"])
def test_a_short_prompt_and_a_chat_do_not_wait_for_long_ones(
    encoder: PromptEncoder, gate: Gate, long: Any
) -> None:
    """Six of one key wait for each other; those of another key, long ones too, pass."""
    work = Work(encoder)
    for uid in range(6):
        work.add(message(uid, long, HEAVY))
    assert gate.begun.acquire(timeout=WAIT_S)
    work.add(message(10, "a", LIGHT))
    work.add(message(11, TokenPrompt(ids=ids_to_bytes([1, 2])), LIGHT))
    assert [answer.uid for answer in steps(work)] == [10, 11]
    work.add(message(12, chat("a"), LIGHT))
    assert answers(work, 1) == [12]
    work.add(message(13, "a" * (SHORT + 1), LIGHT))
    work.add(EncodeMsg(seq=14, prompt=TextPrompt(text="a" * (SHORT + 1)), key=LIGHT))
    work.add(DecodeMsg(seq=15, ids=ids_to_bytes([1] * (SHORT + 1)), key=LIGHT))
    work.add(message(16, TextPrompt(text="a", pair="a" * SHORT), LIGHT))
    assert not work, "the loop has none of them"
    assert answers(work, 4) == [13, 14, 15, 16]
    gate.go_on.set()
    assert answers(work, 6) == list(range(6))


def test_keys_take_turns_in_the_loop(encoder: PromptEncoder) -> None:
    work = Work(encoder)
    for uid in range(3):
        work.add(message(uid, "a", HEAVY))
    work.add(message(5, "a", LIGHT))
    work.add(PingMsg(seq=9))
    assert [getattr(answer, "uid", "ping") for answer in steps(work)] == [0, 5, "ping", 1, 2]


@pytest.mark.needs("minisgl_zoo")
def test_grammars_of_keys_take_turns(
    encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The light key's begins while the first of the heavy key's is compiled."""
    begun, both, go_on = list[int](), threading.Event(), threading.Event()

    def request(self: Any, ids: bytes, sampling: Any, name: str, uid: int, *rest: Any) -> Any:
        begun.append(uid)
        if len(begun) == 2:
            both.set()
        assert go_on.wait(WAIT_S)
        return UserMsg(uid=uid, ids=ids, sampling=sampling)

    work = Work(encoder)
    regex = SamplingParams(structured_outputs={"regex": "a"})
    with monkeypatch.context() as patch:
        patch.setattr(PromptEncoder, "request", request)
        for uid in range(4):
            work.add(message(uid, "a", HEAVY, regex))
        work.add(message(10, "a", LIGHT, regex))
        assert steps(work) == []
        assert both.wait(WAIT_S)
        assert set(begun) == {0, 10}
        assert work.cancel(2)
        go_on.set()
        assert [uid for uid in answers(work, 4) if uid != 10] == [0, 1, 3]
    assert not work.cancel(3), "it has gone on"


def test_a_request_is_taken_back_at_every_place(encoder: PromptEncoder, gate: Gate) -> None:
    work = Work(encoder)
    work.add(message(1, "a"))
    work.add(message(2, LONG_STOP, HEAVY))
    work.add(message(3, LONG_STOP, HEAVY))
    assert gate.begun.acquire(timeout=WAIT_S)
    assert [work.cancel(uid) for uid in (1, 2, 3)] == [True] * 3
    assert [work.cancel(uid) for uid in (1, 2, 3, 4)] == [False] * 4
    assert steps(work) == []
    gate.go_on.set()
    work.add(message(5, LONG_STOP, HEAVY))
    assert answers(work, 1) == [5], "2 and 3 are not answered"


@pytest.mark.needs("minisgl_gateway")
def test_a_thread_that_hangs_is_noticed(
    encoder: PromptEncoder, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    work_ = Work(encoder)
    work_.add(message(1, LONG_STOP))
    assert gate.begun.acquire(timeout=WAIT_S)
    assert not work_.is_late
    monkeypatch.setattr(worker, "JOB_S", 0.0)
    assert work_.is_late
    gate.go_on.set()
    assert answers(work_, 1) == [1]
    while work_.is_late:  # the thread has just answered
        pass


@pytest.mark.needs("minisgl_gateway")
@pytest.mark.parametrize("is_plain", [True, False])
@pytest.mark.parametrize("prompt", [TextPrompt(text="<" * 200_000), chat("<" * 200_000)])
def test_a_text_with_too_many_tokens_is_not_encoded_whole(
    encoder: PromptEncoder, prompt: Any, is_plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a context of 500, twice that; the first look is at 16 characters for each token."""
    from minisgl_gateway import codec_answers as codec

    monkeypatch.setattr(codec, "MIN_TOKENS", 10)
    seen: list[int] = []
    encode = type(encoder.tokenizer).encode

    def counted(tokenizer: Any, text: str, **rest: Any) -> list[int]:
        seen.append(len(text))
        return encode(tokenizer, text, **rest)

    monkeypatch.setattr(type(encoder.tokenizer), "encode", counted)
    asked = EncodeMsg(seq=1, prompt=prompt, is_plain=is_plain, context_length=500)
    assert_too_long(codec.answer_codec(encoder, asked), "at least 8,000 tokens", 1000)
    assert seen == [8000]


def assert_too_long(reply: CodecReply, got: str, most: int) -> None:
    assert reply.failed
    assert (reply.failed.code, reply.failed.status) == ("context_length_exceeded", 400)
    assert got in reply.failed.message
    assert f"at most {most:,} are encoded or decoded in one request" in reply.failed.message


@pytest.mark.needs("minisgl_gateway")
def test_the_bound_of_texts_without_the_model(encoder: PromptEncoder) -> None:
    """It is twice the context, and at least 65,536: for texts and chats."""
    from minisgl_gateway import codec_answers as codec

    for context, most in ((10, 65_536), (40_000, 80_000)):
        for prompt in (TextPrompt(text="<" * (most + 1)), chat("<" * (most + 1))):
            asked = EncodeMsg(seq=1, prompt=prompt, is_plain=True, context_length=context)
            assert_too_long(codec.answer_codec(encoder, asked), f"has {most + 1:,} tokens", most)
    whole = EncodeMsg(seq=1, prompt=TextPrompt(text="<" * 65_536), is_plain=True, context_length=9)
    assert len(codec.answer_codec(encoder, whole).ids) == 4 * 65_536


@pytest.mark.needs("minisgl_gateway")
def test_a_panic_of_a_library_fails_one_request(
    encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Panic(BaseException):
        """As pyo3's PanicException."""

    def fail(*args: Any, **rest: Any) -> Any:
        raise Panic("index out of bounds")

    regex = SamplingParams(structured_outputs={"regex": "a"})
    worked = Work(encoder)
    with monkeypatch.context() as patch:
        patch.setattr(PromptEncoder, "request", fail)
        worked.add(message(1, "a", sampling=regex))
        worked.step()  # a thread answers
        assert failure(worked) == (1, 500, "a library fails with this text: index out of bounds")
    with monkeypatch.context() as patch:
        patch.setattr(PromptEncoder, "encode", fail)
        worked.add(message(2, LONG_STOP))
        assert failure(worked)[:2] == (2, 500)
        worked.add(EncodeMsg(seq=3, prompt=TextPrompt(text=LONG_STOP)))
        assert failure(worked)[:2] == (3, 500)
    worked.add(message(4, LONG_STOP))
    assert answers(worked, 1) == [4]


def failure(worked: Work) -> tuple[int, int, str]:
    while not (found := worked.take()):
        assert select.select([worked.news], [], [], WAIT_S)[0]
    failed = found[0].failed if isinstance(found[0], CodecReply) else found[0]
    assert isinstance(failed, Failed)
    return failed.uid, failed.status, failed.message


@pytest.mark.parametrize(("output", "most"), [(None, 2), ([5], 2), ([5, 6, 7], 4)])
def test_an_answer_that_goes_on_in_a_smaller_context_gets_a_token(
    encoder: PromptEncoder, output: list[int] | None, most: int
) -> None:
    """The scheduler refuses one that can get none."""
    worked, prompt = Work(encoder), TokenPrompt(ids=ids_to_bytes([1] * 8))
    before = None if output is None else ids_to_bytes(output)
    options = {"is_clamped": True, "context_length": 10, "output": before}
    worked.add(message(0, prompt, sampling=SamplingParams(max_tokens=50), **options))
    (asked,) = steps(worked)
    assert asked.sampling.max_tokens == most


def test_what_is_long(encoder: PromptEncoder) -> None:
    parts: Sequence[dict[str, Any]] = [{"type": "text", "text": "a" * 1000}] * 40
    deep: Any = []
    for _ in range(500):
        deep = [deep]
    for value, is_long in (
        ([{"role": "user", "content": "a" * (LONG - 20)}], False),
        ([{"role": "user", "content": "a" * LONG}], True),
        ([{"role": "user", "content": parts}], True),
        ([{"role": "user", "content": "a"}] * 3000, True),
        ([{"a" * LONG: 1}], True),
        (deep, False),
        ([0] * (LONG + 1), True),
    ):
        assert worker._is_longer(value, LONG) is is_long
