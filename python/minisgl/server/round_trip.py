"""Sends the workers messages that run no model, such as pings, and returns the answers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import Sequence

from minisgl.errors import EngineError
from minisgl.message import AdapterReply, Control, PingMsg, ProfileReply, WatchMsg, WatchReply
from minisgl.message.frontend import CodecReply, DecodeMsg, EncodeMsg, PongMsg
from minisgl.server.errors import encodable
from minisgl.utils.zmq import PushQueue

Question = PingMsg | Control | EncodeMsg | DecodeMsg
RoundTripReply = PongMsg | ProfileReply | AdapterReply | CodecReply | WatchReply


class RoundTrips:
    """Sends messages through the workers and waits for their answers. Mutable.

    tokenizers: one queue per tokenizer process. num_ranks: ranks on this machine; each of them
    answers a `PingMsg`, a `ProfileMsg` and an `AdapterMsg`. An answer has the `seq` of its message.
    open_bytes: of the texts that wait to be encoded or decoded, by key; who asks counts them.
    """

    def __init__(self, tokenizers: Sequence[PushQueue], num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.open_bytes: Counter[int] = Counter()
        self._tokenizers = tokenizers
        self._seqs = itertools.count()
        self._waiting: dict[int, asyncio.Queue[RoundTripReply | EngineError]] = {}
        self._failure: EngineError | None = None

    def new_seq(self) -> int:
        return next(self._seqs)

    async def ping(self, timeout_s: float) -> bool:
        """Return whether a ping through each tokenizer comes back from every rank in time."""
        num_answers = len(self._tokenizers) * self.num_ranks
        message = PingMsg(seq=self.new_seq())
        try:
            answers = await self.ask(message, num_answers, timeout_s, self._tokenizers)
        except EngineError:
            return False
        return len(answers) == num_answers

    def tell(self, message: WatchMsg) -> None:
        """Send a message that nobody answers to the first tokenizer."""
        self._tokenizers[0].put([message])

    def deliver(self, answer: RoundTripReply) -> None:
        """Give an answer to the function that waits for it. A late answer is dropped."""
        waiting = self._waiting.get(answer.seq) if answer.seq is not None else None
        if waiting is not None:
            waiting.put_nowait(answer)

    def fail(self, error: EngineError) -> None:
        """End every wait with `error`, and refuse all later messages with it."""
        self._failure = error
        for waiting in self._waiting.values():
            waiting.put_nowait(error)

    async def ask(
        self,
        message: Question,
        num_answers: int,
        timeout_s: float,
        tokenizers: Sequence[PushQueue] = (),
    ) -> list[RoundTripReply]:
        """Send a message with a `new_seq`, and return the answers that come in time, at most
        `num_answers`.

        tokenizers: those that get the message; () is any one. Raises EngineError if a worker is
        gone, InvalidRequest for a value that no message can hold.
        """
        if self._failure:
            raise self._failure
        seq = message.seq
        assert seq is not None
        arrived = self._waiting[seq] = asyncio.Queue()
        answers: list[RoundTripReply] = []
        try:
            with encodable():
                for tokenizer in tokenizers or [self._tokenizers[seq % len(self._tokenizers)]]:
                    tokenizer.put([message])
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    while len(answers) < num_answers:
                        answer = await arrived.get()
                        if isinstance(answer, EngineError):
                            raise answer
                        answers.append(answer)
            return answers
        finally:
            del self._waiting[seq]
