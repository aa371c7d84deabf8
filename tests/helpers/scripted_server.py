"""An API server over a pipeline that the test writes: records in, records out, no model.

The pipeline is a thread that speaks for the tokenizer, the scheduler and the detokenizer over the
real queues. By default it answers each prompt with its own text, a word a token; words that begin
with "!" make something else happen.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from helpers.loop_thread import LoopThread
from minisgl.builtin import model_path
from minisgl.core import Accepted, Failed, Finished, SamplingParams
from minisgl.errors import EngineError
from minisgl.message import (
    AbortMsg,
    ChatPrompt,
    PingMsg,
    ProfileMsg,
    ProfileReply,
    Prompt,
    TextPrompt,
    TextReply,
    TokenizeMsg,
    TokenText,
    WatchMsg,
    WatchReply,
    ids_from_bytes,
    ids_to_bytes,
)
from minisgl.message.frontend import (
    CodecReply,
    DecodeMsg,
    EncodeMsg,
    FrontendMsg,
    PongMsg,
    UserReply,
)
from minisgl.server.address import bind, listen, url_of
from minisgl.server.api_server import create_app
from minisgl.server.clients import Keys
from minisgl.server.frontend import Frontend
from minisgl.server.model import ServedModel
from minisgl.server.observe import Observer
from minisgl.server.web.guards import Door
from minisgl.server.web.http import HttpServer
from minisgl.utils.zmq import AsyncPullQueue, Endpoints, PullQueue, PushQueue

Answer = Callable[[TokenizeMsg, threading.Event], Iterator[UserReply]]

MODEL = "scripted"
OTHER_NAME = "also-scripted"

STATE = msgspec.json.encode(
    {
        "page_size": 1,
        "num_pages": 100,
        "num_free_pages": 100,
        "num_waiting": 0,
        "num_running": 0,
        "max_running": 8,
        "queued_tokens": 0,
        "prefill_tokens_per_s": 1000.0,
    }
)
"""Of a replica, as a router reads it."""


def text_of(message: TokenizeMsg | EncodeMsg) -> str:
    """Return the prompt's text: the last message of a chat, the text, or the ids as words."""
    prompt = message.prompt
    if isinstance(prompt, ChatPrompt):
        return str(prompt.messages[-1]["content"])
    if isinstance(prompt, TextPrompt):
        return prompt.text
    return " ".join(map(str, ids_from_bytes(prompt.ids)))


class ScriptedServer:
    """The API server and its pipeline. Mutable: it keeps the records that reached the pipeline.

    profiling: the ranks' answers to messages about profiles. state: the answer to GET /replica.
    """

    def __init__(
        self,
        *,
        defaults: SamplingParams | None = None,
        observer: Observer | None = None,
        num_ranks: int = 1,
        max_queued: int | None = None,
        stalled: Callable[[], str | None] | None = None,
        door: Door | None = None,
        keys: Keys | None = None,
        tls: ssl.SSLContext | None = None,
        answer: Answer | None = None,
        names: tuple[str, ...] = (MODEL, OTHER_NAME),
        folder: Path | None = None,
    ) -> None:
        """answer: makes the replies to a prompt, instead of `script`. names: the model's names.
        folder: of the checkpoint that is described; None is the built-in model's."""
        self._answer = answer or script
        self._observer = observer
        self._max_queued = max_queued
        self._app_options: dict[str, Any] = {"stalled": stalled} if stalled else {}
        self._app_options |= {"keys": keys, "door": door}
        self._tls = tls
        self._num_ranks = num_ranks
        self.profiling: Sequence[ProfileReply] = ()
        self.state = STATE
        self.received: list[TokenizeMsg] = []
        self.encoded: list[Prompt] = []
        self.num_profiled = 0  # questions that `profiling` has answered
        self.aborted: list[int] = []
        self.silent = threading.Event()  # set: the pipeline reads and says nothing
        self.resumed = threading.Event()  # set: answers go on behind their "!pause"
        self._ended = threading.Event()
        self._endpoints = Endpoints.create()
        self._inbox: PullQueue[FrontendMsg] = PullQueue(self._endpoints.tokenizer(0), FrontendMsg)
        self._outbox = PushQueue(self._endpoints.api)
        self._bound = bind("127.0.0.1", 0)
        self.url = url_of(self._bound, "https" if tls else "http")
        self._model = ServedModel(
            names=names,
            folder=folder or model_path(),
            defaults=defaults or SamplingParams(temperature=0.25),
            created=1,
        )
        self._api, self._pipeline = LoopThread(self._serving()), threading.Thread(target=self._run)

    def __enter__(self) -> ScriptedServer:
        self._pipeline.start()
        self._api.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ended.set()
        self._api.__exit__()
        self._pipeline.join(60)
        assert not self._pipeline.is_alive()
        self._inbox.close()
        self._outbox.close()
        self._bound.close()
        self._endpoints.remove()

    @contextlib.contextmanager
    def templated(self, template: str) -> Iterator[None]:
        """Let the API server see `template` as the model's chat template."""
        kept = self._model.__dict__
        known = ("template", "abilities")  # the second is found anew
        before = {name: kept.pop(name) for name in known if name in kept}
        kept["template"] = template
        yield
        for name in known:
            kept.pop(name, None)
        kept |= before

    def fail(self, error: EngineError) -> None:
        """Fail as the supervisor does when a worker is gone, behind what the pipeline has said."""
        failed = threading.Event()

        async def fail() -> None:
            if not self.silent.is_set():
                assert await self._frontend.round_trips.ping(60)
            self._frontend.fail_all(error)
            failed.set()

        self._api.call(asyncio.ensure_future, fail())
        assert failed.wait(60)

    def pass_time(self, seconds: float) -> None:
        """Let the API server's clock jump."""
        self._api.pass_time(seconds)

    def wait_aborted(self, num: int, timeout_s: float = 60) -> list[int]:
        deadline = time.monotonic() + timeout_s
        while len(self.aborted) < num and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(0.05)  # a second abort of the same request would come now
        return self.aborted

    @property
    def num_open(self) -> int:
        return self._frontend.num_open

    @contextlib.contextmanager
    def reported(self, **info: Any) -> Iterator[None]:
        """In the block, the workers have reported this when they were ready."""
        self._frontend.info = info
        yield
        self._frontend.info = {}

    @contextlib.asynccontextmanager
    async def _serving(self) -> AsyncIterator[None]:
        tokenizer = PushQueue(self._endpoints.tokenizer(0))
        replies: AsyncPullQueue[UserReply] = AsyncPullQueue(self._endpoints.api, UserReply)
        self._frontend = Frontend(
            [tokenizer],
            replies,
            self._observer,
            num_ranks=self._num_ranks,
            max_queued=self._max_queued,
        )
        app = create_app(self._frontend, self._model, **self._app_options)
        http = HttpServer(app, self._tls)
        dispatch = asyncio.create_task(self._frontend.run())
        listen(self._bound)
        started = asyncio.Event()
        serving = asyncio.create_task(http.serve_on(self._bound, started.set))
        await started.wait()
        yield
        http.should_exit = True
        await serving
        dispatch.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await dispatch
        tokenizer.close()
        replies.close()

    def _run(self) -> None:
        running: dict[int, Iterator[UserReply]] = {}
        while not self._ended.is_set():
            for message in self._inbox.get(0.001 if running else 0.02):
                if self.silent.is_set():
                    continue
                if isinstance(message, PingMsg):
                    self._outbox.put([PongMsg(seq=message.seq)] * self._num_ranks)
                elif isinstance(message, ProfileMsg):
                    answers = [msgspec.structs.replace(r, seq=message.seq) for r in self.profiling]
                    self._outbox.put(answers)
                    self.num_profiled += 1
                elif isinstance(message, WatchMsg):
                    self._outbox.put([WatchReply(frame=self.state, seq=message.seq)])
                elif isinstance(message, EncodeMsg):
                    self.encoded.append(message.prompt)
                    ids = [len(word) for word in text_of(message).split()]
                    reply = CodecReply(seq=message.seq, ids=ids_to_bytes(ids))
                    self._outbox.put([reply])
                elif isinstance(message, DecodeMsg):
                    words = map(str, ids_from_bytes(message.ids))
                    self._outbox.put([CodecReply(seq=message.seq, text=" ".join(words))])
                elif isinstance(message, AbortMsg):
                    self.aborted.append(message.uid)
                    running.pop(message.uid, None)
                else:
                    self.received.append(message)
                    running[message.uid] = self._answer(message, self.resumed)
            replies: list[UserReply] = []
            for uid, answer in list(running.items()):
                reply = next(answer, None)
                if reply is None:
                    del running[uid]
                elif not isinstance(reply, PongMsg):  # stands for: nothing in this turn
                    replies.append(reply)
            self._outbox.put(replies)


def script(message: TokenizeMsg, resumed: threading.Event) -> Iterator[UserReply]:
    uid, words = message.uid, text_of(message).split()
    nothing = PongMsg(seq=-1)
    if words and words[0].startswith("!refuse"):
        param = words[0].partition(":")[2] or "prompt"
        yield Failed(
            uid=uid, message="too long", code="context_length_exceeded", status=400, param=param
        )
        return
    while words[:1] == ["!wait"]:  # neither accepted nor refused
        yield nothing
    ids = ids_to_bytes([len(word) for word in words]) if message.returns_ids else b""
    yield Accepted(uid=uid, num_prompt_tokens=len(words), prompt_ids=ids, sampling=message.sampling)
    limit = message.sampling.max_tokens or 1000
    num_output, num_reasoning, stop_match = 0, 0, None
    for word in words[:limit]:
        if word == "!pause":
            while not resumed.is_set():
                yield nothing
            continue
        if word == "!fail":
            yield Failed(uid=uid, message="out of luck", code="engine_error", status=500)
            return
        if word == "!abort":
            break
        if word in message.sampling.stop:
            stop_match = word
            break
        if word == "!hang":
            while True:
                yield nothing
        num_output += 1
        if word.startswith("!part:"):
            _, kind, text = word.split(":", 2)
            shown = text if kind == "content" else ""
            yield TextReply(
                uid=uid,
                text=shown,
                token_ids=[1],
                parts=[(kind, text)],
                logprobs=[-0.5] if message.sampling.logprobs else None,
                tokens=token_texts(message, text),
            )
            num_reasoning += kind == "reasoning"
            continue
        while word == "!forever":
            yield TextReply(uid=uid, text="more ", token_ids=[1])
        logprobs = [-0.5 * len(word)] if message.sampling.logprobs else None
        yield TextReply(
            uid=uid,
            text=f"{word} ",
            token_ids=[len(word)],
            logprobs=logprobs,
            tokens=token_texts(message, word),
        )
    reason = "length" if len(words) > limit else "stop"
    is_split = any(word.startswith("!part:") for word in words)
    if reason == "stop" and not stop_match and is_split and message.sampling.logprobs:
        num_output += 1
        end = token_texts(message, "")  # an end of sequence
        yield TextReply(uid=uid, text="", token_ids=[0], logprobs=[0.0], tokens=end)
    if reason == "stop" and not stop_match and not is_split:
        logprobs = [0.0] if message.sampling.logprobs else None
        tokens = token_texts(message, ".")
        yield TextReply(uid=uid, text=".", token_ids=[0], logprobs=logprobs, tokens=tokens)
    yield Finished(
        uid=uid,
        reason="abort" if "!abort" in words else reason,
        stop_match=stop_match,
        num_prompt_tokens=len(words),
        num_output_tokens=num_output,
        num_reasoning_tokens=num_reasoning,
        num_cached_tokens=len(words) // 2,
        queued_s=0.25,
        prefill_s=0.5,
        decode_s=1.0,
        num_chunks=3,
        num_retractions=1,
    )


def token_texts(message: TokenizeMsg, word: str) -> list[TokenText]:
    """offset: the word's length. top: the word itself, then a part of a character."""
    if not message.sampling.logprobs:
        return []
    top = [(len(word), word.encode(), -0.25), (9, b"\xe4\xb8", -2.0)]
    top = top[: message.sampling.top_logprobs]
    return [TokenText(data=word.encode(), offset=len(word), top=top)]
