"""Checks of the options that end answers or report more; imported by requests with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minisgl.errors import InvalidSampling, brief

if TYPE_CHECKING:
    from minisgl.core.sampling import SamplingParams

MAX_STOP_LENGTH = 1024  # characters; the detokenizer holds back this much text at most
MAX_TOP_LOGPROBS = 20


def check_lengths_and_stops(sampling: SamplingParams) -> None:
    """Raise InvalidSampling for a value out of its bounds."""
    if not 0 <= sampling.top_logprobs <= MAX_TOP_LOGPROBS:
        raise InvalidSampling(
            f"top_logprobs must be from 0 to {MAX_TOP_LOGPROBS}, got "
            f"{brief(sampling.top_logprobs)}",
            param="top_logprobs",
        )
    if sampling.top_logprobs and not sampling.logprobs:
        raise InvalidSampling("top_logprobs needs logprobs=True", param="top_logprobs")
    if sampling.truncate_prompt_tokens is not None and sampling.truncate_prompt_tokens < 1:
        raise InvalidSampling(
            f"truncate_prompt_tokens must be at least 1, got {sampling.truncate_prompt_tokens}",
            param="truncate_prompt_tokens",
        )
    if any(not 0 <= token < 2**31 for token in sampling.stop_token_ids):
        raise InvalidSampling(
            f"stop_token_ids must be token ids, got {brief(list(sampling.stop_token_ids))}",
            param="stop_token_ids",
        )
    for text in sampling.stop:
        if not 0 < len(text) <= MAX_STOP_LENGTH:
            raise InvalidSampling(
                f"a stop string must have 1 to {MAX_STOP_LENGTH} characters, "
                f"got one of {len(text)}",
                param="stop",
            )
        if any("\ud800" <= char <= "\udfff" for char in text):
            raise InvalidSampling(
                f"a stop string must be valid Unicode, got {brief(text)}", param="stop"
            )
