"""The inbox and the outbox of an `LLM`: the requests of all its calls, which run as one batch.

A thread runs the loop while calls are open: the reader of a stream may be slow, and a caller may be
interrupted. It ends when no call is open, so it keeps no engine alive.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec.structs import replace

from minisgl.core import Event, Failed, Finished
from minisgl.core.answer import collect
from minisgl.errors import ConfigError, EngineError, RequestError
from minisgl.llm.keywords import in_keywords
from minisgl.llm.output import Answer, RequestOutput, fields, parts
from minisgl.message import AbortMsg, ExitMsg, RequestReply, SchedulerMsg, TextReply, UserMsg
from minisgl.tokenizer import Detokenizer

OnNews = Callable[[int, int], None]


class LLMEngine(Protocol):
    """The interface of an engine to a `Session`. context: the most tokens of a request."""

    context: int

    def run(self, session: Session) -> None:
        """Run the loop until the session sends an `ExitMsg`. After an error the engine is
        unusable."""

    def close(self) -> None:
        """Release memory, threads and processes."""


class Call:
    """The requests of one call, and their answers so far. Mutable.

    error: why the call failed; None if it has not. on_news: called after each turn of the loop with
    news for this call, with the number of new tokens and the number of requests that have ended; a
    call for each token would take the host much time. num_choices: requests of each prompt.
    answers: by uid. They keep no object for each token, because the garbage collector would visit
    all of them.
    """

    def __init__(self, requests: Sequence[UserMsg], on_news: OnNews, num_choices: int) -> None:
        self.error: BaseException | None = None
        self.requests = requests
        self.on_news = on_news
        self._num_choices = num_choices
        self.answers: dict[int, Answer] = {request.uid: ([], [], []) for request in requests}
        self.open = set(self.answers)
        self._finished: dict[int, Finished] = {}

    @property
    def is_over(self) -> bool:
        return not self.open

    def add(self, reply: RequestReply) -> int:
        """Keep a reply. Returns the number of its tokens."""
        match reply:
            case TextReply(uid=uid):
                texts, token_ids, reports = self.answers[uid]
                texts.append(reply.text)
                token_ids += reply.token_ids
                if reply.logprobs or reply.prompt or reply.parts:
                    reports.append(reply)
                return len(reply.token_ids)
            case Finished(uid=uid):
                self._finished[uid] = reply
                self.open.discard(uid)
            case Failed(uid=uid):
                self.open.discard(uid)
                self.error = self.error or self._error(reply)
        return 0

    def outputs(self) -> list[RequestOutput]:
        """Return the outputs in the order of the requests. Raises the error of a failed call."""
        if self.error:
            raise self.error
        return [self._output(request) for request in self.requests]

    def _error(self, failed: Failed) -> RequestError | EngineError:
        message = in_keywords(failed.message)
        if len(self.requests) > self._num_choices:
            index = (failed.uid - self.requests[0].uid) // self._num_choices  # uids are consecutive
            message = f"prompt {index}: {message}"
        return replace(failed, message=message).to_error()

    def _output(self, request: UserMsg) -> RequestOutput:
        reply = self._finished[request.uid]
        answer = self.answers[request.uid]
        split = collect(parts(answer))
        return RequestOutput(
            **fields(answer, request.sampling),
            reasoning=split.reasoning,
            tool_calls=split.calls,
            finish_reason=reply.reason,
            stop_match=reply.stop_match,
            num_prompt_tokens=reply.num_prompt_tokens,
            num_output_tokens=reply.num_output_tokens,
            num_cached_tokens=reply.num_cached_tokens,
            queued_s=reply.queued_s,
            prefill_s=reply.prefill_s,
            decode_s=reply.decode_s,
            pooled=reply.pooled,
        )


class Session:
    """All open calls, and the thread that runs the loop for them. Mutable.

    The first refusal or failure of a call aborts its other requests.

    Ctrl-C may come anywhere in the main thread. So that thread only appends to `_outgoing`, which
    is one step, and the loop's thread does the rest. It takes `lock` instead of `changed`: Ctrl-C
    in a condition's own code could leave the lock taken.
    """

    def __init__(self, engine: LLMEngine, detokenizer: Detokenizer) -> None:
        self._engine, self._detokenizer = engine, detokenizer
        self._calls: dict[int, Call] = {}  # by the uid of an open request
        self._outgoing: list[SchedulerMsg | Call] = []
        self._num_requests = 0
        self._is_running = False  # whether a thread runs the loop
        self._is_closed = False
        self._pid = os.getpid()  # a fork lacks the thread, which may have the lock
        self.lock = threading.RLock()  # guards all of this
        self.changed = threading.Condition(self.lock)  # notified when a call is over

    def call(self, messages: Sequence[UserMsg], on_news: OnNews, num_choices: int) -> Call:
        """Return a call of these requests, each under a new uid. Raises ConfigError in a fork."""
        if os.getpid() != self._pid:
            raise ConfigError(
                "a forked process lacks the threads of this LLM; start it with spawn, and make one"
            )
        with self.lock:
            first = self._num_requests
            self._num_requests += len(messages)
        requests = [replace(each, uid=uid) for uid, each in enumerate(messages, first)]
        return Call(requests, on_news, num_choices)

    def submit(self, call: Call) -> None:
        """Let the loop run a call. Raises ConfigError if closed.

        If this is interrupted, the loop has the whole call, which `abort` then ends, or nothing.
        """
        with self.lock:
            if self._is_closed:
                raise ConfigError("this LLM is closed; make a new one")
            if not self._is_running:
                threading.Thread(target=self._run, name="llm", daemon=True).start()
            self._put([call])

    def abort(self, call: Call, error: BaseException) -> None:
        """End the call with `error`, unless it has failed already. In a fork do nothing."""
        if os.getpid() != self._pid:
            return
        with self.lock:
            call.error = call.error or error
            call.open.intersection_update(self._calls)  # what the loop has not taken never begins
            self._put([AbortMsg(uid=uid) for uid in sorted(call.open)])

    def complete(self, call: Call) -> None:
        """Let the loop run a call. Wait until it is over, and until the thread has ended if no call
        is open. Raises ConfigError if closed.

        Ctrl-C ends the call after the step that runs. A second one is raised at once, because a
        rank may hang, and closes the engine.
        """
        try:
            self.submit(call)
            self._wait(call)
        except BaseException as error:
            try:
                self.abort(call, error)
                self._wait(call)
            except BaseException:
                self._shut()
                raise
            raise

    def close(self) -> None:
        """End the open calls and release the engine. A second call does nothing."""
        if os.getpid() != self._pid:
            return
        with self.lock:
            if self._is_closed:
                return  # after a second Ctrl-C the thread may hang
            self._shut()
            self.changed.wait_for(lambda: not self._is_running)

    def _shut(self) -> None:
        """Let the thread end the open calls and release the engine, or do so if there is none."""
        with self.lock:
            if self._is_closed:
                return
            self._is_closed = True
            self.changed.notify_all()
            if not self._is_running:
                self._end(_closed())

    def _wait(self, call: Call) -> None:
        with self.lock:
            self.changed.wait_for(
                lambda: (
                    call.is_over and (bool(self._calls or self._outgoing) or not self._is_running)
                )
            )

    def _run(self) -> None:
        """Run the loop while calls are open, unless another thread does. An exception of the loop
        fails all of them and closes the engine, whose state is unknown."""
        error: BaseException | None = None
        with self.lock:
            if self._is_running or self._is_closed:
                return
            self._is_running = True
        while True:
            try:
                self._engine.run(self)
            except BaseException as raised:
                error = raised
            with self.lock:
                if error or self._is_closed or not (self._calls or self._outgoing):
                    self._is_running = False
                    self.changed.notify_all()
                    if error or self._is_closed:  # last: an engine that is broken may not close
                        self._end(error or _closed())
                    return

    def _put(self, messages: Sequence[SchedulerMsg | Call]) -> None:
        self._outgoing += messages
        self.changed.notify_all()

    def _end(self, error: BaseException) -> None:
        self._is_closed = True
        self._take()
        for call in set(self._calls.values()):
            call.error = call.error or error
            call.open.clear()
            call.on_news(0, len(call.requests))
        self._calls.clear()
        self._engine.close()

    # --- the loop's side -------------------------------------------------------------------------

    def take(self, timeout_s: float) -> Sequence[SchedulerMsg]:
        with self.lock:
            if timeout_s and self._calls:  # all requests wait for their grammars to be compiled
                self.changed.wait_for(lambda: self._outgoing or self._is_closed, timeout_s)
            if self._is_closed or not (self._calls or self._outgoing):
                return [ExitMsg()]
            return self._take()

    def _take(self) -> list[SchedulerMsg]:
        """Return the messages to the loop. The calls among them are in `_calls` from now on."""
        messages: list[SchedulerMsg] = []
        for sent in self._outgoing:
            if not isinstance(sent, Call):
                messages.append(sent)
            elif sent.open:
                self._calls.update(dict.fromkeys(sent.open, sent))
                messages += sent.requests
        self._outgoing = []
        return messages

    def post(self, message: SchedulerMsg) -> None:
        """Send a message to the loop, from any thread."""
        with self.lock:
            self._put([message])

    def send(self, events: list[Event]) -> None:
        replies, stops = self._detokenizer.handle(events)
        news: dict[Call, int] = {}
        with self.lock:
            self._outgoing += stops
            for reply in replies:
                if not (call := self._calls.get(reply.uid)):
                    continue  # the detokenizer has failed it before the scheduler did
                news[call] = news.get(call, 0) + call.add(reply)
                if reply.uid not in call.open:
                    del self._calls[reply.uid]
                    if isinstance(reply, Failed) and call.error:
                        self.abort(call, call.error)
                    if call.is_over:
                        self.changed.notify_all()
        for call, num_tokens in news.items():
            call.on_news(num_tokens, len(call.requests) - len(call.open))

    def pong(self, seq: int) -> None:
        raise AssertionError("an offline engine gets no pings")


def _closed() -> ConfigError:
    return ConfigError("this LLM was closed while it computed")
