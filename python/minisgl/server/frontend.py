"""The API process's connection to the workers: it sends prompts, and delivers replies by uid.

A `Call` (`minisgl.server.call`) has the prompts of one HTTP request. Each prompt gets a uid, which
names it in every process. `Frontend` keeps a table from uid to call::

    submit    HTTP handler --prompts--> Frontend --TokenizeMsg--> tokenizer (uid -> call is noted)
    run       detokenizer --replies--> Frontend --(call of the uid)--> Call --> HTTP handler

`run` appends each reply to its call's list, and wakes the call's reader once for all replies of a
turn: with many streams, wake-ups limit the tokens per second more than sockets do.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from minisgl.core import Failed, Finished, SamplingParams
from minisgl.core.adapters import Adapter
from minisgl.core.sampling import ONLY_EMBEDS
from minisgl.errors import EngineError, InvalidRequest, ServerBusy
from minisgl.message import (
    NO_KEY,
    AbortMsg,
    Prompt,
    RequestReply,
    StatusReply,
    TextReply,
    TokenizeMsg,
    WatchReply,
)
from minisgl.message.frontend import UserReply
from minisgl.server.call import Call
from minisgl.server.clients import Job, Key, Origin
from minisgl.server.errors import Draining, encodable
from minisgl.server.observe import Observer
from minisgl.server.round_trip import RoundTripReply, RoundTrips
from minisgl.utils.turns import is_full
from minisgl.utils.zmq import AsyncPullQueue, PushQueue

MAX_COPIES_BYTES: Final = 64 * 2**20
"""The most bytes of a call's prompts, so that one call cannot fill the memory of this process and a
tokenizer's. A prompt counts once for each of its choices, because it is sent so often."""


class Frontend:
    """Sends prompts to the tokenizers and delivers replies to the calls. Mutable.

    tokenizers: one queue per tokenizer process. All messages of a uid go to the same one, so they
    keep their order. observer: counts and traces every request. num_ranks: ranks on this
    machine. on_frame: called with each of the engine's frames that a `WatchMsg` with seconds asks
    for, and with None when no more come. max_queued, max_running: the most requests that may wait
    in the scheduler, and run at once. info: the workers' reports, set when they are ready. failure:
    why requests are refused, from the death of a worker until new ones have started. is_draining:
    new requests are refused. only_embeds: so are all that are not pooled, because the model is an
    encoder. clamps: every request's `max_tokens` is lowered to what the context leaves.
    """

    def __init__(
        self,
        tokenizers: Sequence[PushQueue],
        replies: AsyncPullQueue[UserReply],
        observer: Observer | None = None,
        *,
        num_ranks: int = 1,
        max_queued: int | None = None,
        max_running: int = 0,
        clamps: bool = False,
    ) -> None:
        self.observer = observer or Observer()
        self.round_trips = RoundTrips(tokenizers, num_ranks)
        self.on_frame: Callable[[bytes | None], None] = lambda frame: None
        self.info: Mapping[str, Any] = {}
        self.failure: EngineError | None = None
        self.is_draining = False
        self.only_embeds = False
        self._tokenizers = tokenizers
        self._replies = replies
        self._num_ranks = num_ranks
        self._max_queued = max_queued
        self._clamps = clamps
        self._max_open = 2 * max_queued + max_running if max_queued is not None else None
        self._uids = itertools.count()
        self._calls: dict[int, Call] = {}  # by uid
        self._jobs: dict[int, Job] = {}  # by uid, of requests with an API key

    @property
    def context_length(self) -> int | None:
        """The most tokens of one request; None while the engine starts."""
        return self.info.get("context_length")

    @property
    def num_open(self) -> int:
        """The number of prompts that have not ended."""
        return len(self._calls)

    def submit(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        priority: int = 0,
        origin: Origin | None = None,
        *,
        namespace: str = "",
        adapter: Adapter | None = None,
        num_choices: int = 1,
        is_clamped: bool = False,
        returns_ids: bool = False,
        outputs: Mapping[int, bytes] | None = None,
    ) -> Call:
        """Send `prompts` to the tokenizers, each with `sampling` and a seed of its own.

        origin: of the HTTP request. num_choices: choices per prompt; `prompts` has each prompt this
        many times in a row. The first choice computes the prompt, the others find it in the prefix
        cache. is_clamped: `max_tokens` is lowered to what the context leaves. returns_ids: the call
        gets the prompts' ids. outputs: by position, what another server's engine has made of the
        prompts, which go on with it; the call gets its text, too. Raises EngineError if a worker
        has died or the server ends, ServerBusy if too many prompts are open, InvalidRequest for a
        value that no message can hold, RequestError for a priority that the key does not allow.
        """
        key = origin.key if origin else None
        self._check_call(len(prompts), num_choices, priority, key, bool(sampling.pooling))
        now = time.perf_counter()  # before other tasks can delay this one
        uids = list(itertools.islice(self._uids, len(prompts)))
        call = Call(uids, self._abort, num_choices)
        jobs: dict[int, Job] = {}
        messages: list[TokenizeMsg] = []
        try:
            with encodable():
                _check_size(prompts[::num_choices], sampling, num_choices)
                for position, (uid, prompt) in enumerate(zip(uids, prompts, strict=True)):
                    choice = position % num_choices
                    params = sampling.with_seed(choice)
                    if key:  # the prompt of several choices counts once
                        jobs[uid] = key.begin(prompt, params, counts_prompt=not choice)
                    message = TokenizeMsg(
                        uid=uid,
                        prompt=prompt,
                        sampling=params,
                        priority=priority,
                        share=jobs[uid].share if key else NO_KEY,
                        namespace=namespace,
                        adapter=adapter,
                        context_length=self.context_length,
                        is_clamped=is_clamped or self._clamps,
                        returns_ids=returns_ids,
                        output=None if outputs is None else outputs.get(position, b""),
                        repeats=outputs is not None,
                    )
                    messages.append(message)
                self._send(messages)
        except (InvalidRequest, EngineError):
            for job in jobs.values():
                job.end()
            raise
        self._calls.update(dict.fromkeys(uids, call))
        self._jobs |= jobs
        self.observer.submitted(uids, origin or Origin(), sampling, now)
        return call

    def _send(self, messages: Sequence[TokenizeMsg]) -> None:
        by_tokenizer: dict[PushQueue, list[TokenizeMsg]] = {}
        for message in messages:
            by_tokenizer.setdefault(self._tokenizer_of(message.uid), []).append(message)
        for tokenizer, its in by_tokenizer.items():
            tokenizer.put(its)

    def _check_call(
        self, num_prompts: int, num_choices: int, priority: int, key: Key | None, pools: bool
    ) -> None:
        """Raise the error of a call that must not be sent."""
        if self.only_embeds and not pools:
            raise InvalidRequest(ONLY_EMBEDS, param="model")
        self._check_failure()
        if self.is_draining:
            raise Draining
        if self._max_open is not None and self._is_full(self._max_open, key):
            # The scheduler refuses above --max-queued-requests; as many again are on the way to it.
            raise ServerBusy(f"{self.num_open} prompts are open already; try again later")
        if self._max_queued is not None and num_prompts > self._max_queued:
            # The scheduler would answer "try again later", but a retry would fail too.
            what = "prompts" if num_choices == 1 else "choices"
            raise InvalidRequest(
                f"one call has {num_prompts} {what}, but --max-queued-requests lets "
                f"{self._max_queued} wait; send at most {self._max_queued} in one call",
                param="prompt",
            )
        if key:
            key.check(priority)

    def _is_full(self, most: int, key: Key | None) -> bool:
        if self.num_open < most:
            return False
        jobs = map(self._jobs.get, self._calls)
        keys = [job.share.key if job else NO_KEY.key for job in jobs]
        return is_full(most, keys, key.number if key else NO_KEY.key)

    def _check_failure(self) -> None:
        if self.failure:
            raise self.failure

    async def run(self) -> None:
        """Deliver replies until cancelled."""
        while True:
            replies = await self._replies.get()
            now = time.perf_counter()
            for reply in replies:
                if isinstance(reply, StatusReply):
                    self.observer.status[reply.rank] = reply
                elif isinstance(reply, WatchReply) and reply.seq is None:
                    self.on_frame(reply.frame)
                elif isinstance(reply, RoundTripReply):
                    self.round_trips.deliver(reply)
                else:
                    self._deliver(reply, now)

    def reconnect(
        self,
        tokenizers: Sequence[PushQueue],
        replies: AsyncPullQueue[UserReply],
        info: Mapping[str, Any],
    ) -> None:
        """Use new workers."""
        self._tokenizers, self._replies, self.info = tokenizers, replies, info
        self.round_trips = RoundTrips(tokenizers, self._num_ranks)
        self.failure = None

    def fail_all(self, error: EngineError) -> None:
        """End every open call with `error`, and refuse new ones until `reconnect`."""
        self.failure = error
        for call in set(self._calls.values()):
            call.fail(error)
        self.round_trips.fail(error)
        self.on_frame(None)

    def _deliver(self, reply: RequestReply, now: float) -> None:
        call = self._calls.get(reply.uid)
        if call is None:
            return  # aborted meanwhile
        if job := self._jobs.get(reply.uid):
            job.count(reply)
        if isinstance(reply, TextReply):
            self.observer.text(reply.uid, now)
        elif isinstance(reply, Finished):
            self._close(reply.uid)
            self.observer.finished(reply, now)
        elif isinstance(reply, Failed):
            self._close(reply.uid)
            self.observer.ended(reply.uid, "error", code=reply.code)
        call.deliver(reply)

    def _close(self, uid: int) -> None:
        del self._calls[uid]
        if job := self._jobs.pop(uid, None):
            job.end()

    def _abort(self, uids: list[int], why: Exception) -> None:
        for uid in uids:
            if uid not in self._calls:
                continue
            self._close(uid)
            if isinstance(why, EngineError):
                self.observer.ended(uid, "error", code=why.code)
            else:
                self.observer.ended(uid, "abort")
            if not self.failure:
                self._tokenizer_of(uid).put([AbortMsg(uid=uid)])

    def _tokenizer_of(self, uid: int) -> PushQueue:
        return self._tokenizers[uid % len(self._tokenizers)]


def _check_size(prompts: Sequence[Prompt], sampling: SamplingParams, num_choices: int) -> None:
    """Raise InvalidRequest if the copies that a call makes of its prompts, for all choices, and of
    its sampling parameters, for all prompts, are too large together."""
    num_copies = num_choices * len(prompts)
    if num_copies == 1:  # `body` limits its size
        return
    num_bytes = num_copies * len(msgspec.msgpack.encode(sampling))
    if num_choices > 1:
        num_bytes += num_choices * sum(len(msgspec.msgpack.encode(prompt)) for prompt in prompts)
    if num_bytes > MAX_COPIES_BYTES:
        raise InvalidRequest(
            f"{num_copies} answers need {num_bytes / 2**20:.0f} MiB for copies of the prompt and "
            f"its options, and {MAX_COPIES_BYTES >> 20} MiB are allowed; ask for fewer in one call",
            param="n" if num_choices > 1 else "prompt",
        )
