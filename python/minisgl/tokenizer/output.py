"""The output of one running request, as text, and the stop strings in it.

To find stop strings, one automaton for each (Knuth, Morris, Pratt 1977) reads the text once,
character by character. Its state is the length of the longest suffix of the text that is a prefix
of the stop string; that suffix is held back. So the result does not depend on how the text was cut,
and the time of a token is proportional to its characters, whatever the stop strings are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from minisgl.core import Accepted, Failed, Finished, Token
from minisgl.core.event import PromptLogprobs
from minisgl.message import PromptToken, TextReply, TokenText, ids_from_bytes
from minisgl.tokenizer.stream import TextStream
from minisgl.tokenizer.tokenizer import Tokenizer


class StopMatcher:
    """Passes text on, up to the first complete stop string. Mutable: the state of one request.

    If several stop strings are complete at one character, the longest counts. included: whether the
    text ends behind the stop string instead of before it. match: the stop string that was found; no
    text may be fed after that.
    """

    def __init__(self, stops: Sequence[str], *, included: bool = False) -> None:
        self._included = included
        self._stops = sorted(stops, key=len, reverse=True)
        self._fallbacks = [_fallback(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self._held = ""
        self.match: str | None = None

    def feed(self, text: str) -> str:
        """Return the text that cannot be a part of a stop string any more."""
        buffer = self._held + text
        for end in range(len(self._held) + 1, len(buffer) + 1):
            char = buffer[end - 1]
            for i, stop in enumerate(self._stops):
                state = self._states[i]
                while state and stop[state] != char:
                    state = self._fallbacks[i][state]
                if stop[state] == char:
                    state += 1
                if state == len(stop):
                    self.match = stop
                    self._held = ""
                    return buffer[: end if self._included else end - state]
                self._states[i] = state
        num_free = len(buffer) - max(self._states)
        self._held = buffer[num_free:]
        return buffer[:num_free]

    def flush(self) -> str:
        """Return the text that was held back. Call it when the text has ended."""
        held, self._held = self._held, ""
        return held


def _fallback(stop: str) -> list[int]:
    """Return for each n the length of the longest proper suffix of stop[:n] that is also its
    prefix."""
    table = [0] * len(stop)
    length = 0
    for n in range(2, len(stop)):
        while length and stop[length] != stop[n - 1]:
            length = table[length]
        if stop[length] == stop[n - 1]:
            length += 1
        table[n] = length
    return table


@dataclass(slots=True, kw_only=True, eq=False)
class Output:
    """The output of one running request. Mutable: it collects the contents of the next `TextReply`.

    num_tokens: output tokens so far, up to the one that completed a stop string.
    num_chars: characters of the text so far, those held back for a stop string included. tokens:
    filled only for requests with log-probabilities.
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
    def has_news(self) -> bool:
        """Whether there is something to send."""
        return bool(self.text)

    @property
    def stop_match(self) -> str | None:
        """The stop string that was found, or None. The text is cut before it."""
        return self.matcher.match if self.matcher else None

    def add(self, token: Token | PromptLogprobs) -> bool:
        """Add the token's text. Returns whether it completes a stop string."""
        assert isinstance(token, Token), (
            "only a `PromptOutput` reports log-probabilities of the prompt"
        )
        self.num_tokens += 1
        self.token_ids.append(token.id)
        if token.logprob is not None:
            self.logprobs.append(token.logprob)
            self.tokens.append(self._token_text(token))
        if not token.silent:
            self._add_text(self.stream.feed(token.id))
        return self.stop_match is not None

    def end(self) -> None:
        """Add the text that was held back: no token follows. It may complete a stop string."""
        self._add_text(self.stream.flush())
        if self.matcher and self.matcher.match is None:
            self.text += self.matcher.flush()

    def closed(self, event: Finished) -> Finished:
        """Close the output of a finished request. Returns the event to send, which a subclass may
        change. `take` returns the rest of the text afterwards."""
        return event

    def take(self, uid: int) -> TextReply:
        """Return what was collected since the last call."""
        reply = TextReply(
            uid=uid,
            text=self.text,
            token_ids=self.token_ids,
            logprobs=self.logprobs or None,
            tokens=self.tokens or (),
        )
        self.text, self.token_ids = "", []
        if self.logprobs:
            self.logprobs, self.tokens = [], []
        return reply

    def _token_text(self, token: Token) -> TokenText:
        top = [(id, self.stream.data(id), logprob) for id, logprob in token.top]
        offset = self.num_chars + self.stream.held(token.id)
        return TokenText(data=self.stream.data(token.id), offset=offset, top=top)

    def _add_text(self, text: str) -> None:
        self.num_chars += len(text)
        self.text += self.matcher.feed(text) if self.matcher else text


@dataclass(slots=True, kw_only=True, eq=False)
class PromptOutput(Output):
    """Mutable: it collects the prompt's tokens for the next `TextReply`.

    is_alone: whether the request asks for its prompt alone. It samples a token, as every request
    does, which is then dropped. ids: the prompt's tokens. offsets: the index in the text where each
    begins. prompt: the tokens for the next `TextReply`. num_scored: the number of tokens that
    `prompt` and earlier `TextReply` records have.
    """

    is_alone: bool
    ids: list[int]
    offsets: list[int]
    num_scored: int
    prompt: list[PromptToken] = field(default_factory=list)

    def add(self, token: Token | PromptLogprobs) -> bool:
        if isinstance(token, PromptLogprobs):
            for logprob, top in zip(token.logprobs, token.tops, strict=True):
                self.add_prompt_token(logprob, top)
            return False
        return not self.is_alone and Output.add(self, token)

    def add_prompt_token(self, logprob: float | None, top: list[tuple[int, float]]) -> None:
        token = self.ids[self.num_scored]
        self.prompt.append(
            PromptToken(
                id=token,
                data=self.stream.data(token),
                offset=self.offsets[self.num_scored],
                top=[(id, self.stream.data(id), other) for id, other in top],
                logprob=logprob,
            )
        )
        self.num_scored += 1

    def closed(self, event: Finished) -> Finished:
        if not self.is_alone:
            return event
        return msgspec.structs.replace(event, reason="length", stop_match=None, num_output_tokens=0)

    def take(self, uid: int) -> TextReply:
        prompt, self.prompt = self.prompt, []
        return msgspec.structs.replace(Output.take(self, uid), prompt=prompt)


def prompt_output(
    event: Accepted, tokenizer: Tokenizer, matcher: StopMatcher | None
) -> PromptOutput:
    """Return the output of a request with `Accepted.prompt_ids`. With `echo` it begins with the
    prompt's text, in which stop strings have no effect."""
    sampling = event.sampling
    ids: list[int] = ids_from_bytes(event.prompt_ids).tolist()
    stream = tokenizer.stream(skip_special_tokens=sampling.skip_special_tokens)
    text, offsets = "", []
    for token in ids:
        offsets.append(len(text) + stream.held(token))
        text += stream.feed(token)
    if not sampling.echo:
        text, stream = "", tokenizer.stream(skip_special_tokens=sampling.skip_special_tokens)
    output = PromptOutput(
        num_prompt_tokens=event.num_prompt_tokens,
        stream=stream,
        matcher=matcher,
        num_chars=len(text),
        text=text,
        is_alone=sampling.max_tokens == 0,
        ids=ids,
        offsets=offsets,
        num_scored=0,
    )
    if sampling.prompt_logprobs is not None:
        output.add_prompt_token(None, [])
    return output


def cut(event: Finished | Failed, output: Output) -> Finished:
    """Return the last reply of a request whose text was cut at a stop string.

    Its counts are those of the cut text. If the request failed after the cut, the text is complete,
    and only the timings are missing.
    """
    if isinstance(event, Failed):
        event = Finished(
            uid=event.uid,
            reason="stop",
            num_prompt_tokens=output.num_prompt_tokens,
            num_output_tokens=output.num_tokens,
        )
    return msgspec.structs.replace(
        event,
        reason="stop",
        stop_match=output.stop_match,
        num_output_tokens=output.num_tokens,
        num_accepted=min(event.num_accepted, output.num_tokens),
    )
