"""Checks the sampling options that change logits. Imported when a request uses one."""

from __future__ import annotations

from collections.abc import Collection
from numbers import Integral
from typing import TYPE_CHECKING, Any

from minisgl.core.stop_checks import is_unicode
from minisgl.errors import InvalidSampling
from minisgl.utils.text import brief

if TYPE_CHECKING:
    from minisgl.core.sampling import SamplingParams

MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_LENGTH = 256
MAX_BAD_WORD_IDS = 4 * MAX_BAD_WORD_LENGTH + 4
PENALTY_BOUNDS = {
    "repetition_penalty": (0.01, 10.0),
    "frequency_penalty": (-2.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
}


def checked_logit_options(sampling: SamplingParams) -> dict[str, Any]:
    """Check the options. Returns those whose values are collections, by name, of Python's own
    types.

    Raises InvalidSampling for a value of a wrong type or out of its bounds.
    """
    for name, (least, most) in PENALTY_BOUNDS.items():
        value = getattr(sampling, name)
        if not least <= value <= most:  # NaN is not
            raise InvalidSampling(
                f"{name} must be between {least:g} and {most:g}, got {value}", param=name
            )
    bias = sampling.logit_bias
    if not isinstance(bias, dict) or not all(
        _is_token(token) and isinstance(value, int | float) and -100 <= value <= 100
        for token, value in bias.items()
    ):
        raise InvalidSampling(
            f"logit_bias must map token ids to numbers from -100 to 100, got {brief(bias)}",
            param="logit_bias",
        )
    if len(bias) > MAX_LOGIT_BIAS:
        raise InvalidSampling(
            f"logit_bias may have at most {MAX_LOGIT_BIAS} tokens, got {len(bias)}",
            param="logit_bias",
        )
    allowed = sampling.allowed_token_ids
    if allowed is not None:
        if not isinstance(allowed, tuple | list) or not all(map(_is_token, allowed)):
            raise InvalidSampling(
                f"allowed_token_ids must be a tuple of token ids, got {brief(allowed)}",
                param="allowed_token_ids",
            )
        if not allowed:
            raise InvalidSampling(
                "allowed_token_ids must have a token; None allows all", param="allowed_token_ids"
            )
        allowed = tuple(map(int, allowed))
    most_tokens = 2**31 - 1 if sampling.max_tokens is None else sampling.max_tokens
    if not 0 <= sampling.min_tokens <= most_tokens:
        raise InvalidSampling(
            f"min_tokens must be from 0 to max_tokens, got {sampling.min_tokens}",
            param="min_tokens",
        )
    return {
        "logit_bias": {int(token): float(value) for token, value in bias.items()},
        "allowed_token_ids": allowed,
        "bad_words": _checked_words(sampling.bad_words),
        "bad_words_ids": _checked_sequences(sampling.bad_words_ids),
    }


def _checked_words(words: Any) -> tuple[str, ...]:
    if (
        not isinstance(words, tuple | list)
        or len(words) > MAX_BAD_WORDS
        or not all(isinstance(word, str) and len(word.strip()) > 0 for word in words)
        or any(len(word) > MAX_BAD_WORD_LENGTH for word in words)
    ):
        raise InvalidSampling(
            f"bad_words must be a tuple of at most {MAX_BAD_WORDS} texts of 1 to "
            f"{MAX_BAD_WORD_LENGTH} characters, not all of them spaces, got {brief(words)}",
            param="bad_words",
        )
    if not all(map(is_unicode, words)):
        raise InvalidSampling("bad_words must be valid Unicode", param="bad_words")
    return tuple(words)


def _checked_sequences(sequences: Any) -> tuple[tuple[int, ...], ...]:
    """Return `bad_words_ids` as tuples.

    Their bounds allow the ids of `bad_words`: two sequences for each word, with and without a space
    before it, of at most one token for each byte.
    """
    if (
        not isinstance(sequences, tuple | list)
        or len(sequences) > 2 * MAX_BAD_WORDS
        or not all(isinstance(ids, tuple | list) for ids in sequences)
        or not all(
            0 < len(ids) <= MAX_BAD_WORD_IDS and all(map(_is_token, ids)) for ids in sequences
        )
    ):
        raise InvalidSampling(
            f"bad_words_ids must be a tuple of at most {2 * MAX_BAD_WORDS} tuples of 1 to "
            f"{MAX_BAD_WORD_IDS} token ids, got {brief(sequences)}",
            param="bad_words_ids",
        )
    return tuple(tuple(map(int, ids)) for ids in sequences)


def check_logit_ids(sampling: SamplingParams, vocab_size: int, eos_ids: Collection[int]) -> None:
    """Raise InvalidSampling for ids outside of the vocabulary, or if no token can be sampled."""
    allowed = sampling.allowed_token_ids or ()
    bad = [token for ids in sampling.bad_words_ids for token in ids]
    for name, ids in (
        ("logit_bias", sampling.logit_bias),
        ("allowed_token_ids", allowed),
        ("bad_words_ids", bad),
    ):
        if (highest := max(ids, default=0)) >= vocab_size:
            raise InvalidSampling(
                f"{name} must have token ids between 0 and {vocab_size - 1}, got {highest}",
                param=name,
            )
    stop_ids = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_ids)}
    if allowed and sampling.min_tokens and stop_ids.issuperset(allowed):
        raise InvalidSampling(
            "allowed_token_ids has only tokens that end the answer, which min_tokens forbids; "
            "allow another token or leave out min_tokens",
            param="allowed_token_ids",
        )


def _is_token(value: Any) -> bool:
    is_integer = isinstance(value, Integral) and not isinstance(value, bool)
    return is_integer and 0 <= int(value) < 2**31
