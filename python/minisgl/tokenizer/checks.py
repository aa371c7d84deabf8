"""Checks grammars in a thread, so that other prompts and the text of running streams go on.

A check waits until a helper process has compiled the grammar (`minisgl.grammar.trial`). Most take
1 ms, refusals up to a second. Checks run one after another.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue

import msgspec

from minisgl.core import Failed
from minisgl.message import ChatPrompt, TokenizeMsg, UserMsg
from minisgl.tokenizer.tokenize import PromptEncoder

Finish = Callable[[], UserMsg | Failed]


def begin(encoder: PromptEncoder, message: TokenizeMsg) -> Finish:
    """Encode the prompt. Returns a function that checks the grammar, and then returns the record
    for the scheduler, or the refusal for the client."""
    uid = message.uid
    try:
        ids = encoder.encode(message.prompt, message.context_length)
    except Exception as error:
        failed = Failed.of(uid, error)
        return lambda: failed

    def finish() -> UserMsg | Failed:
        try:
            rest = (message.sampling, message.namespace, uid, message.priority)
            request = encoder.request(ids, *rest)
            return _clamped(message, msgspec.structs.replace(request, share=message.share))
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


class Checks:
    """The requests whose grammars are being checked. Mutable. The first of them starts the thread.

    news: a file descriptor that is readable when a check is done.
    """

    def __init__(self) -> None:
        self.news, self._done_fd = os.pipe()
        os.set_blocking(self.news, False)
        self._tasks: SimpleQueue[tuple[int, Finish]] = SimpleQueue()
        self._done: SimpleQueue[tuple[int, UserMsg | Failed | None]] = SimpleQueue()
        self._open: set[int] = set()
        self._num_pending = 0
        self._thread: threading.Thread | None = None

    def add(self, uid: int, finish: Finish) -> None:
        """Let the thread call `finish`. `take` returns its result."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="checks", daemon=True)
            self._thread.start()
        self._open.add(uid)
        self._num_pending += 1
        self._tasks.put((uid, finish))

    def cancel(self, uid: int) -> bool:
        """Drop the check of a request. Returns False if there is none."""
        is_here = uid in self._open
        self._open.discard(uid)
        return is_here

    def take(self) -> list[UserMsg | Failed]:
        """Return the results since the last call, in the order of `add`."""
        answers: list[UserMsg | Failed] = []
        if not self._num_pending:
            return answers
        try:
            num_done = len(os.read(self.news, 4096))
        except BlockingIOError:
            return answers
        for _ in range(num_done):
            uid, answer = self._done.get()
            self._num_pending -= 1
            if answer is not None and self.cancel(uid):
                answers.append(answer)
        return answers

    def _run(self) -> None:
        while True:
            uid, finish = self._tasks.get()
            self._done.put((uid, finish() if uid in self._open else None))
            os.write(self._done_fd, b".")


def _clamped(asked: TokenizeMsg, message: UserMsg) -> UserMsg:
    """Return `message`. If `asked` allows it, its `max_tokens` is at most what the context
    leaves."""
    wanted = asked.sampling.max_tokens
    if not asked.is_clamped or not wanted or not asked.context_length:
        return message
    left = max(asked.context_length - len(message.ids) // 4, 1)
    sampling = msgspec.structs.replace(message.sampling, max_tokens=min(wanted, left))
    return msgspec.structs.replace(message, sampling=sampling)
