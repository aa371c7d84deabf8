"""The requests that a tokenizer works on. Nobody waits for all the work of another's API key.

A request of one kind waits only for its own kind, and the keys take turns in each::

    short texts, ids   the worker's loop, one a turn, as it takes less time than a thread
    chats              a thread, because a process of its own renders them
    long ones          two threads; the library of tokenizers releases Python's lock
    grammars           two threads, after the prompt, because two processes compile them
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, Final

from msgspec.structs import replace

from minisgl import plugins
from minisgl.core import Failed
from minisgl.errors import EngineError
from minisgl.message import (
    ChatPrompt,
    ProfileMsg,
    SchedulerMsg,
    TextPrompt,
    TokenizeMsg,
    TokenPrompt,
    UserMsg,
    WatchMsg,
)
from minisgl.message.frontend import CodecMsg, CodecReply, DecodeMsg, EncodeMsg, FrontendMsg
from minisgl.tokenizer.tokenize import PromptEncoder
from minisgl.utils.turns import TurnQueue, TurnThreads

SHORT: Final = 8 * 1024
"""Characters of a short text: at most some milliseconds."""

LONG: Final = 32 * 1024
"""Characters from which a chat is a long one; also the tokens of a long list of ids."""

LONG_THREADS: Final = 2
"""Long texts at a time, of different keys. 15 MiB of one character take 2.2 GB of memory."""

GRAMMAR_THREADS: Final = 2
"""As many as `minisgl_zoo.grammar.trial` has helpers."""

JOB_S: Final = 300.0
"""The longest time of a thread's work. It is bounded by seconds of CPU time, so this is a hang."""

Finish = Callable[[], UserMsg | Failed]
Codec = Callable[[PromptEncoder, CodecMsg], CodecReply]
"""The row `codec` of the table `tokenizers`: encodes or decodes; an error is in the reply."""
Answer = SchedulerMsg | ProfileMsg | WatchMsg | Failed | CodecReply


class Work:
    """Mutable. news: a file descriptor that is readable when `take` has answers."""

    def __init__(self, encoder: PromptEncoder) -> None:
        self._encoder = encoder
        self._codec: Codec | None = plugins.find("tokenizers", "codec")
        self._short: TurnQueue[FrontendMsg] = TurnQueue()
        self._chats = TurnThreads("chats")
        self._long = TurnThreads("long texts", LONG_THREADS)
        self._grammars = TurnThreads("grammars", GRAMMAR_THREADS)
        self._open: dict[int, tuple[Hashable, TokenizeMsg, Future[None] | None]] = {}  # by uid
        self.news, self._done_fd = os.pipe()
        os.set_blocking(self.news, False)
        self._done: SimpleQueue[UserMsg | Failed | CodecReply] = SimpleQueue()

    @property
    def is_late(self) -> bool:
        """Whether a thread makes no progress."""
        threads = (self._chats, self._long, self._grammars)
        return max(each.longest_s() for each in threads) > JOB_S

    def add(self, message: FrontendMsg) -> None:
        """Work on a request. Other messages have a turn of their own among the short ones."""
        key, future = _key(message), None
        if isinstance(message, TokenizeMsg | EncodeMsg | DecodeMsg) and (
            threads := self._threads_for(message)
        ):
            future = threads.submit(key, partial(self._encode, key, message))
        else:
            self._short.put(key, message)
        if isinstance(message, TokenizeMsg):
            self._open[message.uid] = key, message, future

    def cancel(self, uid: int) -> bool:
        """Drop a request. Returns False if it was answered, or is unknown."""
        if uid not in self._open:
            return False
        key, message, future = self._open.pop(uid)
        if future:
            future.cancel()
        else:
            self._short.remove(key, message)
        return True

    def __bool__(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._short)

    def step(self) -> list[Answer]:
        """Work on the next short request. Returns its answer; none yet if it has a grammar."""
        if not (found := self._short.take()):
            return []
        key, message = found
        if isinstance(message, TokenizeMsg):
            finish = begin(self._encoder, message)
            if has_grammar(message):
                self._check(key, message, finish)
                return []
            del self._open[message.uid]
            return [finish()]
        if isinstance(message, EncodeMsg | DecodeMsg):
            return [self._coded(message)]
        return [message]

    def take(self) -> list[Answer]:
        """Return the answers of the threads since the last call."""
        answers: list[Answer] = []
        try:
            num_done = len(os.read(self.news, 4096))
        except BlockingIOError:
            return answers
        for _ in range(num_done):
            answer = self._done.get()
            if isinstance(answer, CodecReply):
                answers.append(answer)
            elif answer.uid in self._open:  # else it was cancelled
                del self._open[answer.uid]
                answers.append(answer)
        return answers

    def _threads_for(self, message: TokenizeMsg | CodecMsg) -> TurnThreads | None:
        """Return the threads that encode the message; None if the loop does."""
        if isinstance(message, DecodeMsg):
            return self._long if len(message.ids) // 4 > SHORT else None
        match message.prompt:
            case TextPrompt(text=text):
                is_long = len(text) > SHORT
            case TokenPrompt(ids=ids):
                is_long = len(ids) // 4 > LONG
            case ChatPrompt() as chat:
                given = [chat.messages, chat.tools, chat.template_args]
                return self._long if _is_longer(given, LONG) else self._chats
        if isinstance(message, TokenizeMsg) and not is_long:
            is_long = sum(map(len, message.sampling.bad_words)) > SHORT
        return self._long if is_long else None

    def _encode(self, key: Hashable, message: TokenizeMsg | CodecMsg) -> None:
        with self._failing(message):
            if not isinstance(message, TokenizeMsg):
                self._answer(self._coded(message))
                return
            finish = begin(self._encoder, message)
            if has_grammar(message):
                self._check(key, message, finish)
            else:
                self._answer(finish())

    def _coded(self, message: CodecMsg) -> CodecReply:
        assert self._codec, "the package whose route asks is installed"
        return self._codec(self._encoder, message)

    def _check(self, key: Hashable, message: TokenizeMsg, finish: Finish) -> None:
        def check() -> None:
            with self._failing(message):
                if message.uid in self._open:
                    self._answer(finish())

        self._grammars.submit(key, check)

    @contextlib.contextmanager
    def _failing(self, message: TokenizeMsg | CodecMsg) -> Iterator[None]:
        """Fail a request for a panic of a library in a thread; exceptions are answers already."""
        try:
            yield
        except BaseException as raised:
            error = EngineError(f"a library fails with this text: {raised}")
            if isinstance(message, TokenizeMsg):
                self._answer(Failed.of(message.uid, error))
            else:
                self._answer(CodecReply(seq=message.seq, failed=Failed.of(message.seq, error)))

    def _answer(self, answer: UserMsg | Failed | CodecReply) -> None:
        self._done.put(answer)
        os.write(self._done_fd, b".")


def begin(encoder: PromptEncoder, message: TokenizeMsg) -> Finish:
    """Encode the prompt. Returns a function that checks the grammar, and then returns the record
    for the scheduler, or the refusal for the client."""
    uid = message.uid
    try:
        encoded = encoder.encode(message.prompt, message.context_length)
    except Exception as error:
        failed = Failed.of(uid, error)
        return lambda: failed

    def finish() -> UserMsg | Failed:
        try:
            rest = (message.sampling, message.namespace, uid, message.priority)
            request = encoder.request(encoded, *rest)
            request = replace(request, share=message.share, returns_ids=message.returns_ids)
            return _clamped(message, request)
        except Exception as error:
            return Failed.of(uid, error)

    return finish


def has_grammar(message: TokenizeMsg) -> bool:
    """Whether the request has a grammar that must be checked."""
    if message.sampling.structured_outputs is not None:
        return True
    prompt = message.prompt
    return isinstance(prompt, ChatPrompt) and (
        prompt.tool_choice != "auto" or prompt.thinking_budget is not None
    )


def _clamped(asked: TokenizeMsg, message: UserMsg) -> UserMsg:
    """Return `message`. If `asked` allows it, its `max_tokens` is at most what the context
    leaves."""
    wanted = asked.sampling.max_tokens
    if not asked.is_clamped or not wanted or not asked.context_length:
        return message
    left = max(asked.context_length - len(message.ids) // 4, 1)
    sampling = replace(message.sampling, max_tokens=min(wanted, left))
    return replace(message, sampling=sampling)


def _key(message: FrontendMsg) -> Hashable:
    """Return the number of the request's API key. Without keys each request is a key of its own;
    a message that is no request has another one."""
    if isinstance(message, TokenizeMsg):
        return message.share.key or ("uid", message.uid)
    if isinstance(message, EncodeMsg | DecodeMsg):
        return message.key or ("seq", message.seq)
    return None


def _is_longer(value: Any, most: int) -> bool:
    """Return whether a JSON value has more characters than `most`; each value counts as one."""
    left, values = most, [value]
    while values and left >= 0:
        match values.pop():
            case str(text):
                left -= len(text)
            case dict() as items:
                left -= sum(map(len, items)) + len(items)
                values += items.values()
            case list() as items:
                left -= len(items)
                values += items
    return left < 0
