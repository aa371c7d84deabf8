"""The result of `LLM.generate` for one prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from minisgl.core import FinishReason
from minisgl.message import TextReply

if TYPE_CHECKING:
    from minisgl.core.answer import ToolCall


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

    def __getitem__(self, name: str) -> Any:
        """Return the field of this name. Raises KeyError."""
        if name not in self.__dataclass_fields__:
            raise KeyError(f"{name!r}; the fields are {', '.join(self.__dataclass_fields__)}")
        return getattr(self, name)


def fields(
    texts: Sequence[str],
    token_ids: Sequence[int],
    replies: Sequence[TextReply],
    *,
    in_parts: bool = False,
) -> dict[str, Any]:
    """Return an `Answer`, or a part of one, as fields of `RequestOutput`.

    in_parts: return the fields of a `Delta`, whose `parts` has reasoning and calls in their order.
    """
    made: dict[str, Any] = {"text": "".join(texts), "token_ids": list(token_ids)}
    if replies:
        from minisgl.llm.reports import reports

        made |= reports(replies, in_parts)
    return made
