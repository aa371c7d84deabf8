"""One call of `LLM.generate`: the inbox and the outbox of its requests."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

import msgspec

from minisgl.core import Accepted, Event, Failed, Finished
from minisgl.errors import EngineError, RequestError
from minisgl.llm.output import RequestOutput
from minisgl.message import (
    AbortMsg,
    ExitMsg,
    SchedulerMsg,
    TextReply,
    UserMsg,
)
from minisgl.tokenizer import Detokenizer


class Session:
    """The loop's inbox and outbox for a fixed set of requests. Mutable.

    The first refusal or failure aborts the other requests and is stored in `error`. Ctrl-C aborts
    all. The loop runs until every request has ended, so none is left in the scheduler.

    on_tokens: called with the number of new tokens, once per turn of the loop. A call per token
    took a quarter of the host's time at 256 requests.
    """

    def __init__(
        self,
        requests: Sequence[UserMsg],
        detokenizer: Detokenizer,
        on_tokens: Callable[[int], None],
    ) -> None:
        self.error: RequestError | EngineError | None = None
        self.interrupted = False
        self._detokenizer = detokenizer
        self._on_tokens = on_tokens
        self._order = {request.uid: index for index, request in enumerate(requests)}
        self._outgoing: list[SchedulerMsg] = list(requests)
        self._open = set(self._order)
        self._aborting = False
        self._texts: dict[int, list[str]] = {uid: [] for uid in self._order}
        self._ids: dict[int, list[int]] = {uid: [] for uid in self._order}
        self._logprobs: dict[int, list[float]] = {}
        self._tops: dict[int, list[dict[int, float]]] = {}
        self._finished: dict[int, Finished] = {}

    def take(self, timeout_s: float) -> Sequence[SchedulerMsg]:
        if (self.error or self.interrupted) and not self._aborting:
            self._aborting = True
            self._outgoing += [AbortMsg(uid=uid) for uid in sorted(self._open)]
        messages, self._outgoing = self._outgoing, []
        if not messages and not self._open:
            return [ExitMsg()]
        return messages

    def send(self, events: list[Event]) -> None:
        replies, stops = self._detokenizer.handle(events)
        self._outgoing += stops
        num_tokens = 0
        for reply in replies:
            match reply:
                case TextReply():
                    num_tokens += self._add(reply)
                case Finished():
                    self._finished[reply.uid] = reply
                    self._open.discard(reply.uid)
                case Failed():
                    self._open.discard(reply.uid)
                    self.error = self.error or self._error(reply)
                case Accepted():
                    pass
        if num_tokens:
            self._on_tokens(num_tokens)

    def pong(self, seq: int) -> None:
        raise AssertionError("an offline engine gets no pings")

    def outputs(self) -> list[RequestOutput]:
        """Return the outputs in the order of the requests, which have all finished."""
        return [self._output(uid) for uid in self._order]

    def _add(self, reply: TextReply) -> int:
        """Keep a piece of a request's output. Returns the number of its tokens."""
        self._texts[reply.uid].append(reply.text)
        self._ids[reply.uid] += reply.token_ids
        if reply.logprobs:
            self._logprobs.setdefault(reply.uid, []).extend(reply.logprobs)
            tops = [{id: logprob for id, _, logprob in token.top} for token in reply.tokens]
            if tops[0]:
                self._tops.setdefault(reply.uid, []).extend(tops)
        return len(reply.token_ids)

    def _error(self, failed: Failed) -> RequestError | EngineError:
        if len(self._order) > 1:
            message = f"prompt {self._order[failed.uid]}: {failed.message}"
            failed = msgspec.structs.replace(failed, message=message)
        return failed.to_error()

    def _output(self, uid: int) -> RequestOutput:
        reply = self._finished[uid]
        return RequestOutput(
            text="".join(self._texts[uid]),
            token_ids=self._ids[uid],
            logprobs=self._logprobs.get(uid),
            top_logprobs=self._tops.get(uid),
            finish_reason=reply.reason,
            stop_match=reply.stop_match,
            num_prompt_tokens=reply.num_prompt_tokens,
            num_output_tokens=reply.num_output_tokens,
            num_cached_tokens=reply.num_cached_tokens,
            queued_s=reply.queued_s,
            prefill_s=reply.prefill_s,
            decode_s=reply.decode_s,
        )

    @contextmanager
    def catching_ctrl_c(self) -> Iterator[None]:
        """Turn Ctrl-C into an abort, and raise KeyboardInterrupt when all requests have ended.

        A second Ctrl-C raises at once, since a rank may hang.
        """
        is_main = threading.current_thread() is threading.main_thread()  # only it handles signals
        if not is_main or signal.getsignal(signal.SIGINT) is None:
            yield  # None: a handler outside Python, which could not be put back
            return

        def interrupt(signum: int, frame: FrameType | None) -> None:
            if self.interrupted:
                raise KeyboardInterrupt
            self.interrupted = True

        previous = signal.signal(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)
        if self.interrupted:
            raise KeyboardInterrupt
