"""The API process's one way to the pipeline: requests go in, replies come back by uid.

One `Call` is what one HTTP request asked: one prompt or several, each a uid of its own. Its
replies are collected in a plain list, and its reader is woken once per turn of the loop, however
many came: at 256 streams that, not the sockets, decides how many tokens per second get through.

A call ends in one of: all its prompts finished; one failed (the others are aborted); its client
went away (`abort`); a worker died (`fail_all`). After that, replies to its uids are ignored.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Literal

import msgspec

from minisgl.core import Failed, SamplingParams
from minisgl.errors import EngineError, InvalidRequest, RequestError
from minisgl.message import (
    AbortMsg,
    AcceptedReply,
    FailedReply,
    FinishedReply,
    FrontendMsg,
    PingMsg,
    PongMsg,
    ProfileMsg,
    ProfileReply,
    Prompt,
    StatusReply,
    TextReply,
    TokenizeMsg,
    UserReply,
)
from minisgl.server.telemetry.observe import Observer
from minisgl.server.telemetry.tracing import Origin
from minisgl.utils.zmq import AsyncPullQueue, PushQueue


class ClientGone(Exception):
    """The call was aborted: nobody reads the answer."""


RequestReply = AcceptedReply | TextReply | FinishedReply | FailedReply

Answer = list[tuple[int, TextReply | FinishedReply]]
"""Replies of one wake-up, each with the index of its prompt in the call."""


class Call:
    """The prompts of one HTTP request, under way. One task reads it. Mutable: it is a mailbox."""

    __slots__ = (
        "_abort",
        "_failure",
        "_indices",
        "_num_prompts",
        "_num_unaccepted",
        "_pending",
        "_wakeup",
        "watcher",
    )

    def __init__(self, uids: Sequence[int], abort: Callable[[list[int]], None]) -> None:
        self._indices = {uid: index for index, uid in enumerate(uids)}  # the open ones
        self._num_prompts = self._num_unaccepted = len(uids)
        self._pending: Answer = []
        self._failure: Exception | None = None
        self._wakeup: asyncio.Future[None] | None = None
        self._abort = abort
        self.watcher: asyncio.Task[None] | None = None  # whoever aborts it, kept alive here

    async def accepted(self) -> None:
        """Wait until every prompt is accepted. Raises the refusal, or ClientGone."""
        while self._num_unaccepted and not self._failure:
            await self._news()
        if self._failure:
            raise self._failure

    async def __aiter__(self) -> AsyncIterator[Answer]:
        """Batches until every prompt has finished.

        Raises RequestError or EngineError when one fails, ClientGone after `abort`.
        """
        while True:
            if self._pending:
                batch, self._pending = self._pending, []
                yield batch
            elif self._failure:
                raise self._failure
            elif not self._indices:
                return
            else:
                await self._news()

    def abort(self) -> None:
        """Give up what has not ended: its pages are freed. A second call does nothing."""
        self.fail(ClientGone())

    def fail(self, error: Exception) -> None:
        """End the call with `error`, unless it has ended; what is open is aborted."""
        if self._indices:
            self._end(error)

    def deliver(self, reply: RequestReply) -> None:
        if isinstance(reply, TextReply):
            self._pending.append((self._indices[reply.uid], reply))
        elif isinstance(reply, AcceptedReply):
            self._num_unaccepted -= 1
        elif isinstance(reply, FinishedReply) and reply.reason != "abort":
            self._pending.append((self._indices.pop(reply.uid), reply))
        else:
            index, error = self._indices.pop(reply.uid), _error(reply)
            if self._num_prompts > 1 and isinstance(error, RequestError) and error.status == 400:
                error.param = f"prompt[{index}]" if error.param == "prompt" else error.param
                error.message = f"prompt[{index}]: {error.message}"
            self._end(error)
        self._wake()

    def _end(self, error: Exception) -> None:
        uids = list(self._indices)
        self._indices.clear()
        self._failure = error
        self._abort(uids)
        self._wake()

    def _wake(self) -> None:
        if self._wakeup is not None and not self._wakeup.done():
            self._wakeup.set_result(None)

    async def _news(self) -> None:
        self._wakeup = asyncio.get_running_loop().create_future()
        await self._wakeup


class Frontend:
    """Hands prompts to the tokenizers and replies to the calls that wait for them.

    tokenizers: one queue per tokenizer process; a uid always goes to the same one, so that its
    messages keep their order. num_ranks: of this machine, each of which answers a `ProfileMsg`
    and a `PingMsg`.
    max_queued: requests that the scheduler lets wait. `context_length`: tokens of one request at
    most, set once the engine is ready. `observer` is told of everything. `failure` is set once a
    worker is gone, for good.
    """

    def __init__(
        self,
        tokenizers: Sequence[PushQueue],
        replies: AsyncPullQueue[UserReply],
        observer: Observer | None = None,
        *,
        num_ranks: int = 1,
        max_queued: int | None = None,
    ) -> None:
        self.observer = observer or Observer()
        self._max_queued = max_queued
        self._num_ranks = num_ranks
        self._tokenizers = tokenizers
        self._replies = replies
        self._uids = itertools.count()
        self._calls: dict[int, Call] = {}
        self._asked: dict[int, asyncio.Queue[PongMsg | ProfileReply | EngineError]] = {}
        self.context_length: int | None = None
        self.failure: EngineError | None = None

    @property
    def num_open(self) -> int:
        return len(self._calls)

    def submit(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        priority: int = 0,
        origin: Origin | None = None,
        *,
        namespace: str = "",
    ) -> Call:
        """Send `prompts`, each with `sampling`. Draws a seed for each if `sampling` has none.

        Raises EngineError when a worker is gone, InvalidRequest for what cannot be sent.
        """
        if self.failure:
            raise self.failure
        if self._max_queued is not None and len(prompts) > self._max_queued:
            # Of the scheduler they would get "try again later", as likely as not for ever.
            raise InvalidRequest(
                f"one call has {len(prompts)} prompts, but --max-queued-requests lets "
                f"{self._max_queued} wait; send at most {self._max_queued} in one call",
                param="prompt",
            )
        now = time.perf_counter()  # before others may get this core
        uids = list(itertools.islice(self._uids, len(prompts)))
        call = Call(uids, self._abort)
        by_tokenizer: dict[int, list[FrontendMsg]] = {}
        for uid, prompt in zip(uids, prompts, strict=True):
            params = sampling
            if params.seed is None:
                params = msgspec.structs.replace(params, seed=secrets.randbits(63))
            message = TokenizeMsg(
                uid=uid,
                prompt=prompt,
                sampling=params,
                priority=priority,
                namespace=namespace,
                context_length=self.context_length,
            )
            by_tokenizer.setdefault(uid % len(self._tokenizers), []).append(message)
        try:
            for index, messages in by_tokenizer.items():
                self._tokenizers[index].put(messages)
        except (OverflowError, UnicodeEncodeError) as error:
            raise InvalidRequest(
                f"the request holds a value that is out of range: {error}"
            ) from None
        self._calls.update(dict.fromkeys(uids, call))
        self.observer.submitted(uids, origin or Origin(), sampling, now)
        return call

    async def run(self) -> None:
        """Deliver replies until cancelled."""
        while True:
            replies = await self._replies.get()
            now = time.perf_counter()
            for reply in replies:
                self._dispatch(reply, now)

    async def ping(self, timeout_s: float) -> bool:
        """Whether a message by way of each tokenizer gets round the whole pipeline in time, all
        ranks of this machine included."""
        num = len(self._tokenizers) * self._num_ranks
        message = PingMsg(seq=next(self._uids))
        try:
            return len(await self._ask(message, self._tokenizers, num, timeout_s)) == num
        except EngineError:
            return False

    async def profile(
        self, action: Literal["start", "stop"], timeout_s: float
    ) -> list[ProfileReply]:
        """One reply for each rank, in order; a rank that says nothing in time has failed.

        Raises EngineError when a worker is gone.
        """
        message = ProfileMsg(seq=next(self._uids), action=action)
        replies = await self._ask(message, self._tokenizers[:1], self._num_ranks, timeout_s)
        said = {reply.rank: reply for reply in replies if isinstance(reply, ProfileReply)}
        too_late = EngineError(f"no answer from the engine within {timeout_s:g} s")
        failed = Failed.of(message.seq, too_late)
        return [
            said.get(rank) or ProfileReply(seq=message.seq, rank=rank, failed=failed)
            for rank in range(self._num_ranks)
        ]

    async def _ask(
        self,
        message: PingMsg | ProfileMsg,
        tokenizers: Sequence[PushQueue],
        num_replies: int,
        timeout_s: float,
    ) -> list[PongMsg | ProfileReply]:
        """The replies that come in time, `num_replies` at most."""
        if self.failure:
            raise self.failure
        seq = message.seq
        answers: asyncio.Queue[PongMsg | ProfileReply | EngineError]
        answers = self._asked[seq] = asyncio.Queue()
        replies: list[PongMsg | ProfileReply] = []
        try:
            for tokenizer in tokenizers:
                tokenizer.put([message])
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    while len(replies) < num_replies:
                        reply = await answers.get()
                        if isinstance(reply, EngineError):
                            raise reply
                        replies.append(reply)
            return replies
        finally:
            del self._asked[seq]

    def fail_all(self, error: EngineError) -> None:
        """End every open call with `error`, and refuse what comes from now on."""
        self.failure = error
        for call in set(self._calls.values()):
            call.fail(error)
        for answers in self._asked.values():
            answers.put_nowait(error)

    def _dispatch(self, reply: UserReply, now: float) -> None:
        if isinstance(reply, PongMsg | ProfileReply | StatusReply):
            self._on_news(reply)
            return
        call = self._calls.get(reply.uid)
        if call is None:  # aborted meanwhile
            return
        if isinstance(reply, TextReply):
            self.observer.text(reply.uid, now)
        elif isinstance(reply, FinishedReply):
            del self._calls[reply.uid]
            self.observer.finished(reply, now)
        elif isinstance(reply, FailedReply):
            del self._calls[reply.uid]
            self.observer.ended(reply.uid, "error", code=reply.code)
        call.deliver(reply)

    def _on_news(self, reply: PongMsg | ProfileReply | StatusReply) -> None:
        if isinstance(reply, StatusReply):
            self.observer.status[reply.rank] = reply
            return
        answers = self._asked.get(reply.seq)
        if answers is not None:
            answers.put_nowait(reply)

    def _abort(self, uids: list[int]) -> None:
        for uid in uids:
            if self._calls.pop(uid, None) is None:
                continue
            if self.failure:
                self.observer.ended(uid, "error", code=self.failure.code)
            else:
                self.observer.ended(uid, "abort")
                self._tokenizers[uid % len(self._tokenizers)].put([AbortMsg(uid=uid)])


def _error(reply: FailedReply | FinishedReply) -> RequestError | EngineError:
    if isinstance(reply, FinishedReply):  # an abort that this side asked for never comes here
        return EngineError("the server aborted the request")
    return Failed(
        uid=reply.uid,
        message=reply.message,
        code=reply.code,
        status=reply.status,
        param=reply.param,
    ).to_error()
