"""How tokens become text: the last hop of a request before the API server.

Each turn of the scheduler's loop brings the events of all running requests, in order::

    Accepted   is passed on; from here on the request has an `_Output`
    Token      its text goes into the `_Output`; at the end of the turn it leaves as a `TextReply`
    Finished   is passed on, after the rest of the text; the `_Output` is dropped
    Failed     is passed on; the `_Output` is dropped

Text that leaves is final: no later token changes it. So two kinds of text are held back: bytes that
are not a whole character yet (`TextStream`), and text that may be the start of a stop string
(`StopMatcher`).

How a stop string ends a request: when a token completes one, the text is cut before it, later
tokens of the request are ignored, and a `StopMsg` asks the scheduler to end the request. The
scheduler answers with `Finished`, which is passed on with the stop string as its `stop_match`. A
request that ended by itself or failed in the meantime has sent its last event already; that event
takes the place of the answer. So the scheduler ends every request, and it ends it once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from minisgl.core import Accepted, Event, Failed, Finished, SamplingParams, Token
from minisgl.message import StopMsg, TextReply, TokenText, UserReply
from minisgl.tokenizer.stream import TextStream
from minisgl.tokenizer.tokenizer import Tokenizer
from minisgl.utils.logger import get_logger

if TYPE_CHECKING:
    from minisgl.tokenizer.stop import StopMatcher

logger = get_logger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class _Output:
    """The output of one running request. Mutable: it collects what the next `TextReply` takes.

    num_tokens: output tokens up to and including the one that completed a stop string. num_chars:
    characters of the text so far, held text included. tokens: for requests with log-probabilities.
    """

    num_prompt_tokens: int
    stream: TextStream
    matcher: StopMatcher | None
    num_tokens: int = 0
    num_chars: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tokens: list[TokenText] = field(default_factory=list)

    @property
    def stop_match(self) -> str | None:
        """The stop string that was found: the text is cut before it."""
        return self.matcher.match if self.matcher else None

    def add(self, token: Token) -> bool:
        """Add the token's text. Returns whether it completes a stop string."""
        self.num_tokens += 1
        self.token_ids.append(token.id)
        if token.logprob is not None:
            self.logprobs.append(token.logprob)
            self.tokens.append(self._token_text(token))
        if not token.silent:
            self._add_text(self.stream.feed(token.id))
        return self.stop_match is not None

    def end(self) -> None:
        """No token follows: release the held text, which may complete a stop string itself."""
        self._add_text(self.stream.flush())
        if self.matcher and self.matcher.match is None:
            self.text += self.matcher.flush()

    def take(self, uid: int) -> TextReply:
        """What was collected since the last call."""
        reply = TextReply(
            uid=uid,
            text=self.text,
            token_ids=self.token_ids,
            logprobs=self.logprobs or None,
            tokens=self.tokens,
        )
        self.text, self.token_ids, self.logprobs, self.tokens = "", [], [], []
        return reply

    def _token_text(self, token: Token) -> TokenText:
        top = [(id, self.stream.data(id), logprob) for id, logprob in token.top]
        return TokenText(data=self.stream.data(token.id), offset=self.num_chars, top=top)

    def _add_text(self, text: str) -> None:
        self.num_chars += len(text)
        self.text += self.matcher.feed(text) if self.matcher else text


class Detokenizer:
    """Holds one `_Output` per running request, from `Accepted` to `Finished` or `Failed`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._outputs: dict[int, _Output] = {}

    @property
    def num_running(self) -> int:
        return len(self._outputs)

    def handle(self, events: Iterable[Event]) -> tuple[list[UserReply], list[StopMsg]]:
        """Returns the replies for the clients, and a `StopMsg` for each request that was cut.

        Events of one uid are in order. Events of an unknown uid are ignored, except `Failed`: a
        request may be refused before it is accepted. An exception fails only its request.
        """
        replies: list[UserReply] = []
        stops: list[StopMsg] = []
        touched: dict[int, _Output] = {}  # the outputs with new tokens, in order
        for event in events:
            output = self._outputs.get(event.uid)
            try:
                if isinstance(event, Token):
                    if output is None or output.stop_match is not None:
                        continue  # a step in flight computed it after the end
                    touched[event.uid] = output
                    if output.add(event):
                        stops.append(StopMsg(uid=event.uid, num_tokens=output.num_tokens))
                elif isinstance(event, Accepted):
                    self._outputs[event.uid] = self._open(event)
                    replies.append(event)
                else:
                    self._outputs.pop(event.uid, None)
                    touched.pop(event.uid, None)
                    replies += _last_replies(event, output)
            except Exception as error:
                logger.exception("request %d: making its text failed", event.uid)
                self._outputs.pop(event.uid, None)
                touched.pop(event.uid, None)
                replies.append(Failed.of(event.uid, error))
                if isinstance(event, Accepted | Token):  # the scheduler still runs it
                    num_tokens = output.num_tokens if output else 0
                    stops.append(StopMsg(uid=event.uid, num_tokens=num_tokens))
        replies += [output.take(uid) for uid, output in touched.items() if output.text]
        return replies, stops

    def _open(self, event: Accepted) -> _Output:
        sampling = event.sampling
        return _Output(
            num_prompt_tokens=event.num_prompt_tokens,
            stream=self._tokenizer.stream(skip_special_tokens=sampling.skip_special_tokens),
            matcher=_matcher(sampling),
        )


def _matcher(sampling: SamplingParams) -> StopMatcher | None:
    if not sampling.stop:
        return None
    from minisgl.tokenizer.stop import StopMatcher

    return StopMatcher(sampling.stop, included=sampling.include_stop_str_in_output)


def _last_replies(event: Finished | Failed, output: _Output | None) -> list[UserReply]:
    """The rest of the text, and the end of the request."""
    if output is None:
        return [event] if isinstance(event, Failed) else []
    if isinstance(event, Finished) and output.stop_match is None:
        output.end()
    if output.stop_match is not None:
        event = _cut(event, output)
    elif isinstance(event, Failed):
        return [event]
    rest = output.take(event.uid)
    return [rest, event] if rest.token_ids or rest.text else [event]


def _cut(event: Finished | Failed, output: _Output) -> Finished:
    """The end of a request whose text was cut, with the counts of what the client received.

    The answer is complete even if the request failed later; then only its timings are unknown.
    """
    if isinstance(event, Failed):
        event = Finished(
            uid=event.uid,
            reason="stop",
            num_prompt_tokens=output.num_prompt_tokens,
            num_output_tokens=output.num_tokens,
        )
    return msgspec.structs.replace(
        event, reason="stop", stop_match=output.stop_match, num_output_tokens=output.num_tokens
    )
