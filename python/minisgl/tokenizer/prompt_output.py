"""The output of a request whose answer has the prompt's text or log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from minisgl.core import Accepted, Finished, Token
from minisgl.core.event import PromptLogprobs
from minisgl.message import PromptToken, TextReply, ids_from_bytes
from minisgl.tokenizer.output import Output
from minisgl.tokenizer.stop import StopMatcher
from minisgl.tokenizer.tokenizer import Tokenizer


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
