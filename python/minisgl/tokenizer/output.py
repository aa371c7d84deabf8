"""The output of one running request, as text."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from minisgl.core import Failed, Finished, Token
from minisgl.core.event import PromptLogprobs
from minisgl.message import TextReply, TokenText
from minisgl.tokenizer.stop import StopMatcher
from minisgl.tokenizer.stream import TextStream


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
