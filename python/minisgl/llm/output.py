"""The answer to a prompt: whole as `RequestOutput`, in pieces as `Delta`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from minisgl.core import FinishReason, SamplingParams
from minisgl.core.answer import Part, ToolCall
from minisgl.message import PromptToken, TextReply, TokenText

Answer = tuple[list[str], list[int], list[TextReply]]
"""The answer to a request so far: texts, token ids, and the replies that report more than these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """The answer to one prompt.

    text: ends before a stop string. token_ids: all output tokens, an end-of-sequence included.
    logprobs: the log-probability of each output token, None unless `SamplingParams.logprobs`.
    top_logprobs: for each output token the most likely ids at its position and their
    log-probabilities, None unless `SamplingParams.top_logprobs`.
    prompt_logprobs, prompt_top_logprobs: the same for the prompt's tokens, None unless
    `SamplingParams.prompt_logprobs`. The first token has None and no ids.
    reasoning, tool_calls: parts of the answer in a chat with `tools`; `text` is then the rest. The
    arguments of a call are JSON as the model wrote it.
    pooled: see `Finished`; `LLM.embed` makes embeddings of it.
    stop_match: the stop string or stop token id that ended the answer; None for the model's end of
    sequence or another `finish_reason`. num_cached_tokens: prompt tokens found in the prefix cache.
    queued_s, prefill_s, decode_s: seconds until the first step, then until the first token, then
    until the end.

    `output["text"]` is `output.text`, for programs that were written for dictionaries.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_match: str | int | None
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    queued_s: float
    prefill_s: float
    decode_s: float
    logprobs: list[float] | None = None
    top_logprobs: list[dict[int, float]] | None = None
    prompt_logprobs: list[float | None] | None = None
    prompt_top_logprobs: list[dict[int, float]] | None = None
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    pooled: bytes = b""

    def __getitem__(self, name: str) -> Any:
        """Return the field of this name. Raises KeyError."""
        if name not in self.__dataclass_fields__:
            raise KeyError(f"{name!r}; the fields are {', '.join(self.__dataclass_fields__)}")
        return getattr(self, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """New text of an answer, and its tokens. The text is empty while a character is not complete.

    logprobs, top_logprobs, prompt_logprobs, prompt_top_logprobs: as in `RequestOutput`, for the new
    tokens of the answer and of the prompt.
    parts: in a chat with `tools`, the new parts in order: ("reasoning", text), ("content", text),
    which `text` has, too, ("call", name of the function), and ("arguments", next piece of the last
    call's arguments).
    """

    text: str
    token_ids: list[int]
    logprobs: list[float] | None = None
    top_logprobs: list[dict[int, float]] | None = None
    prompt_logprobs: list[float | None] | None = None
    prompt_top_logprobs: list[dict[int, float]] | None = None
    parts: list[Part] = field(default_factory=list)


def fields(answer: Answer, asked: SamplingParams) -> dict[str, Any]:
    """Return an answer, or a part of one, as fields of `RequestOutput` and `Delta`."""
    texts, token_ids, replies = answer
    made: dict[str, Any] = {"text": "".join(texts), "token_ids": token_ids}
    if asked.logprobs:
        made["logprobs"] = [logprob for reply in replies for logprob in reply.logprobs or ()]
    if asked.top_logprobs:
        made["top_logprobs"] = [_top(token) for reply in replies for token in reply.tokens]
    if prompt := [token for reply in replies for token in reply.prompt]:
        made["prompt_logprobs"] = [token.logprob for token in prompt]
        if asked.prompt_logprobs:
            made["prompt_top_logprobs"] = [_top(token) for token in prompt]
    return made


def parts(answer: Answer) -> list[Part]:
    """Return the parts of an answer that is split."""
    return [part for reply in answer[2] for part in reply.parts]


def _top(token: TokenText | PromptToken) -> dict[int, float]:
    return {id: logprob for id, _, logprob in token.top}
