"""The output of a request whose answer is split into reasoning, content and tool calls."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from minisgl.core import Accepted, Finished, Token
from minisgl.core.answer import Part
from minisgl.core.event import PromptLogprobs
from minisgl.message import TextReply
from minisgl.tokenizer.output import Output, StopMatcher
from minisgl.tokenizer.tokenizer import Tokenizer
from minisgl_zoo.calls import AnswerForm, AnswerParser
from minisgl_zoo.calls.known import special_texts


@dataclass(slots=True, kw_only=True, eq=False)
class SplitOutput(Output):
    """Mutable: it collects the parts for the next `TextReply`.

    num_reasoning: tokens of reasoning so far, with the marks before and behind it.
    """

    parser: AnswerParser
    parts: list[Part] = field(default_factory=list)
    num_reasoning: int = 0

    @property
    def has_news(self) -> bool:
        return bool(self.parts)

    def add(self, token: Token | PromptLogprobs) -> bool:
        was_reasoning = self.parser.is_reasoning
        stops = Output.add(self, token)
        self._split()
        self.num_reasoning += was_reasoning or self.parser.is_reasoning
        return stops

    def end(self) -> None:
        Output.end(self)
        self._split()

    def closed(self, event: Finished) -> Finished:
        match = event.stop_match
        is_cut = event.reason != "stop" or match is not None
        following = match if isinstance(match, str) else ""
        self.parts += self.parser.flush(is_cut=is_cut, following=following)
        return msgspec.structs.replace(event, num_reasoning_tokens=self.num_reasoning)

    def take(self, uid: int) -> TextReply:
        parts, self.parts = self.parts, []
        content = "".join(text for kind, text in parts if kind == "content")
        return msgspec.structs.replace(Output.take(self, uid), text=content, parts=parts)

    def _split(self) -> None:
        self.parts += self.parser.feed(self.text)
        self.text = ""


def split_output(event: Accepted, tokenizer: Tokenizer, matcher: StopMatcher | None) -> SplitOutput:
    """Return the output of a request with `Accepted.form`.

    The parser needs the marks of the form, so they are not skipped even if they are special tokens.
    """
    form = msgspec.json.decode(event.form, type=AnswerForm)
    ids = map(tokenizer.backend.token_to_id, special_texts(form.calls, form.reasoning))
    shown = frozenset(id for id in ids if id is not None)
    skip = event.sampling.skip_special_tokens
    return SplitOutput(
        num_prompt_tokens=event.num_prompt_tokens,
        stream=tokenizer.stream(skip_special_tokens=skip, shown=shown),
        matcher=matcher,
        parser=AnswerParser(form),
    )
