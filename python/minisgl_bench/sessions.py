"""The requests of a benchmark in sessions, and the client that sends them.

`shards` runs many clients.

Prompts are token ids. For a server that takes only text, each id is written as an English word, so
prefixes that are equal as ids are equal as text.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
import numpy as np
import numpy.typing as npt

from minisgl.benchmark.client import Answer, Target, measure
from minisgl.benchmark.record import Record

Ids = npt.NDArray[np.int32]

_COMMON_WORDS = """
time year people way day man thing woman life child world school state family student group
country problem hand part place case week company system program question work number night
point home water room mother area money story fact month lot right study book eye job word
business issue side kind head house service friend father power hour game line end member law
"""


def as_text(ids: Ids) -> str:
    """Return a common word for each id, which most large vocabularies have as one token."""
    words = _COMMON_WORDS.split()
    return " ".join(words[i % len(words)] for i in ids.tolist())


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A turn. ids: of the user's message. think_s: the pause before it is sent."""

    ids: Ids
    max_tokens: int
    think_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A session. at_s: when its first turn is sent, from the start; None: when a client is free."""

    turns: tuple[Turn, ...]
    at_s: float | None = None


class Client:
    """One process's requests. on_progress(requests, tokens): called when a request ends."""

    def __init__(self, target: Target, start_at: float, on_progress: Callable[[int, int], None]):
        self._target = target
        self._start_at = start_at
        self._on_progress = on_progress
        self._records: list[Record] = []

    async def run(
        self, sessions: Sequence[tuple[int, Session]], concurrency: int | None
    ) -> list[Record]:
        """Run numbered sessions: `concurrency` at once, or at their times if it is None."""
        headers = (
            {"Authorization": f"Bearer {self._target.api_key}"} if self._target.api_key else {}
        )
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_read=self._target.timeout_s),
            headers=headers,
        ) as self._http:
            await asyncio.sleep(self._start_at - time.perf_counter())
            if concurrency is None:
                await self._at_their_times(sessions)
            else:
                todo = iter(sessions)
                await asyncio.gather(*(self._one_by_one(todo) for _ in range(concurrency)))
        return self._records

    async def _at_their_times(self, sessions: Sequence[tuple[int, Session]]) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number, session in sorted(sessions, key=lambda item: item[1].at_s or 0.0):
                due = session.at_s or 0.0
                if (wait := self._start_at + due - time.perf_counter()) > 0:
                    await asyncio.sleep(wait)
                tasks.create_task(self._session(number, session))

    async def _one_by_one(self, todo: Iterator[tuple[int, Session]]) -> None:
        for number, session in todo:
            await self._session(number, session)

    async def _session(self, number: int, session: Session) -> None:
        history: list[Any] = []
        for index, turn in enumerate(session.turns):
            if turn.think_s:
                await asyncio.sleep(turn.think_s)
            record = Record(session=number, turn=index, due=None if index else session.at_s)
            body = self._body(history, turn)
            answer = await measure(self._http, self._target, body, record, self._start_at)
            self._records.append(record)
            self._on_progress(1, record.num_output or len(record.chunks))
            if record.error is not None:
                return
            history += self._answered(answer)

    def _body(self, history: list[Any], turn: Turn) -> bytes:
        """Add the turn to the history of its session. Returns the request's body."""
        target = self._target
        if target.api == "chat":
            history.append({"role": "user", "content": as_text(turn.ids)})
            prompt: dict[str, Any] = {"messages": history}
        elif target.text:
            history.append(as_text(turn.ids))
            prompt = {"prompt" if target.api == "completions" else "text": " ".join(history)}
        else:
            history += turn.ids.tolist()
            prompt = {"prompt" if target.api == "completions" else "input_ids": history}
        body = {**prompt, "max_tokens": turn.max_tokens, "stream": True, "temperature": 0.0}
        if target.api != "generate":
            body["stream_options"] = {"include_usage": True}
            if target.model is not None:
                body["model"] = target.model
        if target.ignore_eos:
            body["ignore_eos"] = True
        return msgspec.json.encode({**body, **target.extra})

    def _answered(self, answer: Answer) -> list[Any]:
        if self._target.api == "chat":
            return [{"role": "assistant", "content": "".join(answer.texts)}]
        return ["".join(answer.texts)] if self._target.text else answer.token_ids
