"""The scheduler's events to replies with text: the request's last hop before the API server.

One reply per request and turn, however many tokens the turn brought. Text is final when it is
sent: what a later token could change, or a stop string could still take back, waits.

::

    Accepted -> AcceptedReply     Token* -> TextReply     Finished | Failed -> its reply

A stop string is found here, because it is text. The stream is then cut and `StopMsg` asks the
scheduler to end the request; its `Finished` (or one that was already under way) brings the usage
for the `FinishedReply`. So every request still ends once, by an event of the scheduler.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from minisgl.core import Accepted, Event, Failed, Finished, SamplingParams, Token
from minisgl.message import AcceptedReply, FinishedReply, StopMsg, TextReply, UserReply
from minisgl.tokenizer.stop import StopMatcher
from minisgl.tokenizer.stream import TextStream
from minisgl.tokenizer.tokenize import failed_reply
from minisgl.tokenizer.tokenizer import Tokenizer
from minisgl.utils.logger import get_logger

logger = get_logger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class _Output:
    """One running request. Mutable: text and ids wait in it for the next reply.

    num_tokens: tokens so far, up to a stop string if one was found.
    """

    num_prompt_tokens: int
    sampling: SamplingParams
    stream: TextStream
    matcher: StopMatcher | None
    num_tokens: int = 0
    last_id: int = -1
    text: str = ""
    token_ids: list[int] = field(default_factory=list)

    @property
    def match(self) -> str | None:
        return self.matcher.match if self.matcher else None

    def add_token(self, token: Token) -> bool:
        """True if its text completes a stop string."""
        self.num_tokens += 1
        self.last_id = token.id
        self.token_ids.append(token.id)
        if not token.silent:
            self._add_text(self.stream.feed(token.id))
        return self.match is not None

    def end(self) -> None:
        """No token follows: give free what was held back, unless it completes a stop string."""
        self._add_text(self.stream.flush())
        if self.matcher and self.match is None:
            self.text += self.matcher.flush()

    def _add_text(self, text: str) -> None:
        self.text += self.matcher.feed(text) if self.matcher else text

    def take(self) -> tuple[str, list[int]]:
        taken = self.text, self.token_ids
        self.text, self.token_ids = "", []
        return taken


class Detokenizer:
    """Keeps one `_Output` per running request, from `Accepted` to `Finished` or `Failed`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._outputs: dict[int, _Output] = {}

    @property
    def num_running(self) -> int:
        return len(self._outputs)

    def handle(self, events: Iterable[Event]) -> tuple[list[UserReply], list[StopMsg]]:
        """Replies for the clients, and requests that the scheduler is to end.

        Events of one uid are in order. Those of a uid that is unknown or has ended are ignored,
        but a `Failed` is passed on: a request may be refused before it was accepted.
        """
        replies: list[UserReply] = []
        stops: list[StopMsg] = []
        touched: dict[int, None] = {}  # uids with new tokens, in order
        for event in events:
            try:
                match event:
                    case Token(uid=uid):
                        self._on_token(event, stops)
                        touched[uid] = None
                    case Accepted():
                        replies.append(self._on_accepted(event))
                    case Finished():
                        replies += self._on_finished(event)
                    case Failed():
                        replies += self._on_failed(event)
            except Exception as error:  # costs this request, not the others
                logger.exception("request %d: its text could not be made", event.uid)
                output = self._outputs.pop(event.uid, None)
                replies.append(failed_reply(Failed.of(event.uid, error)))
                if isinstance(event, Accepted | Token):  # the scheduler has it still
                    num_tokens = output.num_tokens if output else 0
                    stops.append(StopMsg(uid=event.uid, num_tokens=num_tokens))
        for uid in touched:
            output = self._outputs.get(uid)
            if output and output.text:
                text, token_ids = output.take()
                replies.append(TextReply(uid=uid, text=text, token_ids=token_ids))
        return replies, stops

    def _on_accepted(self, event: Accepted) -> AcceptedReply:
        sampling = event.sampling
        self._outputs[event.uid] = _Output(
            num_prompt_tokens=event.num_prompt_tokens,
            sampling=sampling,
            stream=self._tokenizer.stream(skip_special_tokens=sampling.skip_special_tokens),
            matcher=StopMatcher(sampling.stop) if sampling.stop else None,
        )
        return AcceptedReply(uid=event.uid, num_prompt_tokens=event.num_prompt_tokens)

    def _on_token(self, event: Token, stops: list[StopMsg]) -> None:
        output = self._outputs.get(event.uid)
        if output is None or output.match is not None:
            return  # ended, or cut at a stop string: the tokens of steps in flight
        if output.add_token(event):
            stops.append(StopMsg(uid=event.uid, num_tokens=output.num_tokens))

    def _on_finished(self, event: Finished) -> list[UserReply]:
        output = self._outputs.pop(event.uid, None)
        if output is None:
            return []
        if output.match is None:
            output.end()
        cut: dict[str, Any] = {}
        if output.match is not None:
            cut = {"reason": "stop", "stop_match": output.match}
        elif event.reason == "stop" and output.last_id in output.sampling.stop_token_ids:
            cut = {"stop_match": output.last_id}
        text, token_ids = output.take()
        own = {"text": text, "token_ids": token_ids, "num_output_tokens": output.num_tokens, **cut}
        # What the scheduler counted and timed has the same names in both records.
        return [FinishedReply(**(msgspec.structs.asdict(event) | own))]

    def _on_failed(self, event: Failed) -> list[UserReply]:
        output = self._outputs.get(event.uid)
        if output is None or output.match is None:
            self._outputs.pop(event.uid, None)
            return [failed_reply(event)]
        # The answer was complete before the failure; only its usage of the cache is not known.
        return self._on_finished(
            Finished(
                uid=event.uid,
                reason="stop",
                num_prompt_tokens=output.num_prompt_tokens,
                num_output_tokens=output.num_tokens,
            )
        )
