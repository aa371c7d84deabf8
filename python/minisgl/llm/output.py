"""The result of `LLM.generate` for one prompt."""

from __future__ import annotations

from dataclasses import dataclass

from minisgl.core import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """text: ends before a stop string. token_ids: all output tokens, an end-of-sequence included.

    logprobs: the log-probability of each output token, None unless `SamplingParams.logprobs`.
    top_logprobs: for each output token the most likely ids at its position and their
    log-probabilities, None unless `SamplingParams.top_logprobs`.
    stop_match: the stop string or stop token id that ended it; None for the model's own end or
    another `finish_reason`. num_cached_tokens: prompt tokens found in the prefix cache. Times are
    seconds: queued_s until the first step, prefill_s until the first token, decode_s until the end.
    """

    text: str
    token_ids: list[int]
    logprobs: list[float] | None
    top_logprobs: list[dict[int, float]] | None
    finish_reason: FinishReason
    stop_match: str | int | None
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    queued_s: float
    prefill_s: float
    decode_s: float
