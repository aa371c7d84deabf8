"""Checks the options `stop`, `stop_token_ids`, `top_logprobs` and `max_tokens=0`. Imported when a
request uses one."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral
from typing import TYPE_CHECKING, Any

import msgspec

from minisgl.errors import InvalidSampling
from minisgl.utils.text import brief

if TYPE_CHECKING:
    from minisgl.core.sampling import SamplingParams

MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 256
MAX_STOP_LENGTH = 1024  # characters; the detokenizer holds back this much text at most


def check_rare(sampling: SamplingParams) -> None:
    """Raise InvalidSampling for a stop that can never match, or an option that needs another."""
    if sampling.top_logprobs and not sampling.logprobs:
        raise InvalidSampling("top_logprobs needs logprobs=True", param="top_logprobs")
    if sampling.max_tokens == 0 and sampling.prompt_logprobs is None and not sampling.echo:
        raise InvalidSampling(
            f"max_tokens must be from 1 to {2**31 - 1}; 0 is allowed with echo or prompt_logprobs",
            param="max_tokens",
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
        if not is_unicode(text):
            raise InvalidSampling(
                f"a stop string must be valid Unicode, got {brief(text)}", param="stop"
            )


def is_unicode(text: str) -> bool:
    """Return whether UTF-8 can encode the text. JSON can hold one half of a surrogate pair."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def take_stops(sampling: SamplingParams) -> None:
    """Check the types of `stop` and `stop_token_ids`. They become tuples of Python's own values."""
    _take_items(sampling, "stop_token_ids", "token ids", Integral, int, MAX_STOP_TOKEN_IDS)
    _take_items(sampling, "stop", "strings", str, str, MAX_STOP_STRINGS)


def _take_items(
    sampling: SamplingParams,
    name: str,
    items: str,
    kind: type,
    plain: Callable[[Any], Any],
    most: int,
) -> None:
    values = getattr(sampling, name)
    if isinstance(values, tuple | list) and len(values) > most:
        raise InvalidSampling(
            f"{name} may have at most {most} {items}, got {len(values)}", param=name
        )
    if not isinstance(values, tuple | list) or not all(isinstance(value, kind) for value in values):
        raise InvalidSampling(f"{name} must be a tuple of {items}, got {brief(values)}", param=name)
    msgspec.structs.force_setattr(sampling, name, tuple(map(plain, values)))
