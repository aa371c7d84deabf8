"""The output of one running request, as text."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from minisgl.core import Accepted, Failed, Finished, Token
from minisgl.core.event import PromptLogprobs
from minisgl.message import PromptToken, TextReply, TokenText, ids_from_bytes
from minisgl.tokenizer.stop import StopMatcher
from minisgl.tokenizer.stream import TextStream
from minisgl.tokenizer.tokenizer import Tokenizer


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
        return TokenText(data=self.stream.data(token.id), offset=self.num_chars, top=top)

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
        offsets.append(len(text))
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
        event, reason="stop", stop_match=output.stop_match, num_output_tokens=output.num_tokens
    )
