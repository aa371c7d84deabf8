"""`LLM.stream`: one request, whose answer the caller reads while it is computed.

A thread runs the loop while streams are open, because their readers may be slow. After a turn it
wakes the readers of streams with news; a `Reader` makes a `Delta` of all that is new.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from minisgl.core import SamplingParams
from minisgl.errors import InvalidRequest
from minisgl.llm.output import RequestOutput, fields
from minisgl.llm.prompts import chat_records, is_list, prompt_records
from minisgl.llm.session import Call, OnNews, Session

if TYPE_CHECKING:
    from minisgl.llm.llm import LLM


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """New text of an answer, and its tokens. The text is empty while a character is not complete.

    logprobs, top_logprobs, prompt_logprobs, prompt_top_logprobs: as in `RequestOutput`, for the new
    tokens of the answer and of the prompt.
    parts: in a chat with `tools`, the new parts in order: ("reasoning", text), ("content", text),
    which `text` has, too, ("call", name of the function), and ("arguments", next piece of the last
    call's arguments).
    """

    text: str
    token_ids: list[int]
    logprobs: list[float] | None = None
    top_logprobs: list[dict[int, float]] | None = None
    prompt_logprobs: list[float | None] | None = None
    prompt_top_logprobs: list[dict[int, float]] | None = None
    parts: list[tuple[str, str]] = field(default_factory=list)


ChatArgs = tuple[dict[str, Any], Any, Any]
"""Variables of the chat template, tools, tool_choice."""


class Left(Exception):
    """The reader has left the stream."""


class Reader:
    """Cuts the output of a call with one request into deltas. Mutable: it counts what was read."""

    def __init__(self, session: Session, call: Call) -> None:
        self._session, self._call = session, call
        (self._uid,) = (request.uid for request in call.requests)
        self._read = (0, 0, 0)  # of each list of the answer

    def news(self) -> tuple[Delta | None, bool]:
        """Return what is new since the last call of this method, if anything, and whether the
        request is over."""
        with self._session.changed:
            return self._delta(), self._call.is_over

    def leave(self) -> None:
        """Abort the request if it is not over."""
        if not self._call.is_over:
            self._session.abort(self._call, Left())

    def _delta(self) -> Delta | None:
        texts, token_ids, replies = self._call.answers[self._uid]
        text, id, reply = self._read
        self._read = len(texts), len(token_ids), len(replies)
        if text == len(texts):
            return None
        return Delta(**fields(texts[text:], token_ids[id:], replies[reply:], in_parts=True))


class Streams:
    """The open streams of an `LLM`, and the thread that runs the loop for them. Mutable.

    The thread ends when no stream is open, so it keeps no engine alive.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._calls: set[Call] = set()
        self._is_running = False

    @property
    def is_over(self) -> bool:
        self._calls = {call for call in self._calls if not call.is_over}
        return not self._calls

    def add(self, call: Call) -> None:
        with self._session.changed:
            self._calls.add(call)
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._lead, name="llm-streams", daemon=True).start()

    def _lead(self) -> None:
        while True:
            with contextlib.suppress(Exception):  # it is in each call, whose reader raises it
                self._session.wait(self)
            with self._session.changed:
                if self.is_over:
                    self._is_running = False
                    return


def submit(
    llm: LLM,
    prompt: Any,
    params: SamplingParams | None,
    cache_salt: str,
    chat: ChatArgs,
    on_news: OnNews,
    is_chat: bool = False,
) -> Call:
    """Send one prompt to the loop: a text, ids or a conversation. is_chat: it must be a
    conversation. Raises InvalidRequest."""
    is_chat = is_chat or (is_list(prompt) and len(prompt) > 0 and isinstance(prompt[0], Mapping))
    if not is_chat and chat != ({}, None, "auto"):
        name = next(iter(chat[0]), "tools")
        raise InvalidRequest(f"{name} is for chat templates, so for conversations", param=name)
    records, count = chat_records(prompt, *chat) if is_chat else prompt_records(prompt)
    if count != 1:
        raise InvalidRequest(
            f"a stream has one prompt, got {count}; call stream for each, or generate",
            param="prompts",
        )
    call = llm._submit(llm._encode(records, 1), params, 1, cache_salt, on_news)
    llm._streams.add(call)
    return call


class Stream(Iterator[Delta | RequestOutput]):
    """The iterator that `LLM.stream` returns. Mutable."""

    def __init__(
        self,
        llm: LLM,
        prompt: Any,
        params: SamplingParams | None,
        cache_salt: str,
        chat: ChatArgs,
    ) -> None:
        self._is_over = True  # nothing to close, if the next line raises
        # The lambda must not hold `self`: a stream that its reader drops is deleted, which ends it.
        news: queue.SimpleQueue[None] = queue.SimpleQueue()
        call = submit(llm, prompt, params, cache_salt, chat, lambda *_: news.put(None))
        self._is_over = False
        self._news, self._call = news, call
        self._reader = Reader(llm._session, call)

    def __next__(self) -> Delta | RequestOutput:
        try:
            while not self._is_over:
                delta, is_over = self._reader.news()
                if delta:
                    return delta
                if is_over:
                    self._is_over = True
                    return self._call.outputs()[0]
                self._news.get()
        except KeyboardInterrupt:
            self.close()
            raise
        raise StopIteration

    def close(self) -> None:
        """End the request. The rest of its answer is dropped."""
        if not self._is_over:
            self._is_over = True
            self._reader.leave()

    def __del__(self) -> None:
        self.close()
