"""Sends the workers messages that run no model (pings, profiles, ids), and returns the answers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final, Literal

import msgspec

from minisgl.core import Failed
from minisgl.errors import EngineError, ServerBusy
from minisgl.message import PingMsg, ProfileMsg, ProfileReply, Prompt, WatchMsg, WatchReply
from minisgl.message.frontend import CodecReply, DecodeMsg, EncodeMsg, PongMsg
from minisgl.server.errors import encodable
from minisgl.utils.zmq import PushQueue

RoundTripReply = PongMsg | ProfileReply | CodecReply | WatchReply

CODEC_TIMEOUT_S: Final = 60.0
"""A prompt waits until the tokenizer has encoded its key's prompts before it."""

MAX_OPEN_BYTES: Final = 32 * 2**20
"""The most bytes of texts that one key may let wait here, two of the largest bodies. Prompts of the
model have other bounds."""

SMALL: Final = 64 * 1024
"""Messages of at most so many bytes are not refused for `MAX_OPEN_BYTES`."""


class RoundTrips:
    """Sends messages through the workers and waits for each rank's answer. Mutable.

    tokenizers: one queue per tokenizer process. num_ranks: ranks on this machine; each of them
    answers a `PingMsg` and a `ProfileMsg`. An answer has the `seq` of its message.
    """

    def __init__(self, tokenizers: Sequence[PushQueue], num_ranks: int) -> None:
        self._tokenizers = tokenizers
        self._num_ranks = num_ranks
        self._seqs = itertools.count()
        self._waiting: dict[int, asyncio.Queue[RoundTripReply | EngineError]] = {}
        self._failure: EngineError | None = None
        self._open_bytes: Counter[int] = Counter()  # of messages to encode or decode, by key

    async def ping(self, timeout_s: float) -> bool:
        """Return whether a ping through each tokenizer comes back from every rank in time."""
        message = PingMsg(seq=next(self._seqs))
        num_answers = len(self._tokenizers) * self._num_ranks
        try:
            answers = await self._ask(message, self._tokenizers, num_answers, timeout_s)
        except EngineError:
            return False
        return len(answers) == num_answers

    async def profile(
        self, action: Literal["start", "stop"], timeout_s: float
    ) -> list[ProfileReply]:
        """Return one reply for each rank, in order. A rank that does not answer in time has failed.

        Raises EngineError if a worker is gone.
        """
        message = ProfileMsg(seq=next(self._seqs), action=action)
        answers = await self._ask(message, self._tokenizers[:1], self._num_ranks, timeout_s)
        by_rank = {answer.rank: answer for answer in answers if isinstance(answer, ProfileReply)}
        too_late = EngineError(f"no answer from the engine within {timeout_s:g} s")
        failed = Failed.of(message.seq, too_late)
        return [
            by_rank.get(rank) or ProfileReply(seq=message.seq, rank=rank, failed=failed)
            for rank in range(self._num_ranks)
        ]

    async def replica_state(self, timeout_s: float) -> bytes:
        """Return the JSON of rank 0's `ReplicaState`. Raises EngineError."""
        message = WatchMsg(seq=next(self._seqs))
        answers = await self._ask(message, self._tokenizers[:1], 1, timeout_s)
        if not answers or not isinstance(answers[0], WatchReply):
            raise EngineError(f"no answer from the engine within {timeout_s:g} s")
        return answers[0].frame

    async def encode(
        self,
        prompt: Prompt,
        key: int,
        context_length: int | None,
        *,
        is_plain: bool = False,
        with_pieces: bool = False,
    ) -> CodecReply:
        """Return the ids of `prompt`. Raises RequestError, EngineError.

        key, context_length, is_plain, with_pieces: see `EncodeMsg`.
        """
        message = EncodeMsg(
            seq=next(self._seqs),
            prompt=prompt,
            is_plain=is_plain,
            with_pieces=with_pieces,
            key=key,
            context_length=context_length,
        )
        with encodable():
            num_bytes = len(msgspec.msgpack.encode(prompt))
        with self._counted(key, num_bytes):
            return await self._codec(message)

    async def decode(self, ids: bytes, key: int, context_length: int | None) -> str:
        """Return the text of token ids (little-endian int32). Raises RequestError, EngineError.

        key, context_length: see `DecodeMsg`.
        """
        message = DecodeMsg(seq=next(self._seqs), ids=ids, key=key, context_length=context_length)
        with self._counted(key, len(ids)):
            return (await self._codec(message)).text

    @contextlib.contextmanager
    def _counted(self, key: int, num_bytes: int) -> Iterator[None]:
        """Count the bytes of a key's open messages. Raises ServerBusy if they are too many."""
        is_large = num_bytes > SMALL
        if is_large and self._open_bytes[key] + num_bytes > MAX_OPEN_BYTES:
            raise ServerBusy(
                f"{self._open_bytes[key] / 2**20:.0f} MiB of your texts wait to be encoded or "
                f"decoded, and at most {MAX_OPEN_BYTES >> 20} MiB may wait; try again later"
            )
        self._open_bytes[key] += num_bytes
        try:
            yield
        finally:
            self._open_bytes[key] -= num_bytes

    async def _codec(self, message: EncodeMsg | DecodeMsg) -> CodecReply:
        tokenizer = self._tokenizers[message.seq % len(self._tokenizers)]
        answers = await self._ask(message, [tokenizer], 1, CODEC_TIMEOUT_S)
        if not answers or not isinstance(answers[0], CodecReply):
            raise EngineError(f"no answer from the tokenizer within {CODEC_TIMEOUT_S:g} s")
        if failed := answers[0].failed:
            raise failed.to_error()
        return answers[0]

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

    async def _ask(
        self,
        message: PingMsg | ProfileMsg | EncodeMsg | DecodeMsg | WatchMsg,
        tokenizers: Sequence[PushQueue],
        num_answers: int,
        timeout_s: float,
    ) -> list[RoundTripReply]:
        """Return the answers that come in time, at most `num_answers`.

        Raises EngineError after `fail`, InvalidRequest for a value that no message can hold.
        """
        if self._failure:
            raise self._failure
        seq = message.seq
        assert seq is not None
        arrived: asyncio.Queue[RoundTripReply | EngineError] = asyncio.Queue()
        self._waiting[seq] = arrived
        answers: list[RoundTripReply] = []
        try:
            with encodable():
                for tokenizer in tokenizers:
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
