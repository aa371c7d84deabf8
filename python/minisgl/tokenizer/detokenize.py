"""The detokenizer: turns events of the scheduler into replies for the API server.

Each turn of the scheduler's loop sends the events of all running requests, in order::

    Accepted   create the request's `Output`; send the event on; the `Output` reads what an earlier
               engine has made, and sends that only if it is asked to
    Token      add its text to the `Output`; after the turn's events, send it as a `TextReply`
    Finished   send the rest of the text, then the event; delete the `Output`
    Failed     send the text of earlier tokens, then the event; delete the `Output`

Text that was sent is final: no later token changes it. So two kinds of text are held back: bytes
that are not a whole character yet (`TextStream`), and text that may be the start of a stop string
(`StopMatcher`).

How a stop string ends a request: when a token completes one, the text is cut before it, later
tokens of the request are ignored, and a `StopMsg` asks the scheduler to end the request. The
scheduler answers with `Finished`, which is sent on with the stop string as its `stop_match`. If the
request has already finished or failed by then, its last event is used instead. So only the
scheduler ends requests, and it ends each once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from minisgl import plugins
from minisgl.core import Accepted, Event, Failed, Finished, Token
from minisgl.core.event import PromptLogprobs
from minisgl.message import RequestReply, StopMsg, ids_from_bytes
from minisgl.tokenizer.output import Output, StopMatcher, cut, prompt_output
from minisgl.tokenizer.tokenizer import Tokenizer
from minisgl.utils.logger import get_logger

logger = get_logger(__name__)

SplitOutput = Callable[[Accepted, Tokenizer, StopMatcher | None], Output]
"""The row `split` of the table `answers`: makes the output of a request whose answer has parts."""


class Detokenizer:
    """Holds one `Output` per running request, from `Accepted` to `Finished` or `Failed`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._outputs: dict[int, Output] = {}
        self._split_output: SplitOutput | None = plugins.find("answers", "split")

    @property
    def num_running(self) -> int:
        return len(self._outputs)

    def handle(self, events: Iterable[Event]) -> tuple[list[RequestReply], list[StopMsg]]:
        """Return the replies for the clients, and a `StopMsg` for each request to be stopped.

        Events of one uid must be in order. Events of an unknown uid are ignored, except `Failed`,
        which refuses a request instead of accepting it. An exception fails only its request.
        """
        replies: list[RequestReply] = []
        stops: list[StopMsg] = []
        touched: dict[int, Output] = {}  # the outputs with new tokens, in order
        for event in events:
            output = self._outputs.get(event.uid)
            try:
                if isinstance(event, Token | PromptLogprobs):
                    if output is None or output.stop_match is not None:
                        continue  # computed by a step that was launched before the end was known
                    touched[event.uid] = output
                    if output.add(event):
                        stops.append(StopMsg(uid=event.uid, num_tokens=output.num_tokens))
                elif isinstance(event, Accepted):
                    self._outputs[event.uid] = output = self._open(event)
                    replies.append(event)
                    if event.output:
                        if _read(output, event):
                            stops.append(StopMsg(uid=event.uid, num_tokens=output.num_tokens))
                        had = output.take(event.uid)  # new tokens of this turn come after it
                        replies += [had] if event.repeats else []
                else:
                    self._outputs.pop(event.uid, None)
                    touched.pop(event.uid, None)
                    replies += _last_replies(event, output)
            except Exception as error:
                logger.exception("request %d: detokenization failed", event.uid)
                self._outputs.pop(event.uid, None)
                touched.pop(event.uid, None)
                replies.append(Failed.of(event.uid, error))
                if not isinstance(event, Finished | Failed):  # the scheduler still runs it
                    num_tokens = output.num_tokens if output else 0
                    stops.append(StopMsg(uid=event.uid, num_tokens=num_tokens))
        replies += [output.take(uid) for uid, output in touched.items() if output.has_news]
        return replies, stops

    def _open(self, event: Accepted) -> Output:
        sampling = event.sampling
        matcher = None
        if sampling.stop:
            matcher = StopMatcher(sampling.stop, included=sampling.include_stop_str_in_output)
        if sampling.shows_prompt or sampling.pooling:
            return prompt_output(event, self._tokenizer, matcher)
        if event.form:
            assert self._split_output, "the encoder that split the answer is installed"
            return self._split_output(event, self._tokenizer, matcher)
        return Output(
            num_prompt_tokens=event.num_prompt_tokens,
            stream=self._tokenizer.stream(skip_special_tokens=sampling.skip_special_tokens),
            matcher=matcher,
        )


def _read(output: Output, event: Accepted) -> bool:
    """Add the tokens of an earlier engine. Returns whether they complete a stop string."""
    ids: list[int] = ids_from_bytes(event.output).tolist()
    return any(output.add(Token(uid=event.uid, id=token)) for token in ids)


def _last_replies(event: Finished | Failed, output: Output | None) -> list[RequestReply]:
    """Return the rest of the text, if any, and the last reply of the request.

    A failed request gets no text that was held back.
    """
    if output is None:
        return [event] if isinstance(event, Failed) else []
    if isinstance(event, Finished) and output.stop_match is None:
        output.end()
    if output.stop_match is not None:
        event = cut(event, output)
    if isinstance(event, Finished):
        event = output.closed(event)
    rest = output.take(event.uid)
    is_empty = not (rest.token_ids or rest.text or rest.parts or rest.prompt)
    return [event] if is_empty else [rest, event]
