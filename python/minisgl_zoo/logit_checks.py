"""Checks the sampling options that forbid or favour tokens, and finds the tokens of `bad_words`.

A check returns the value as Python's own type, as in `minisgl.core.sampling`. It raises
InvalidSampling, which names the field, the given value and the allowed ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Integral
from typing import TYPE_CHECKING, Any, Final

from minisgl.errors import InvalidSampling
from minisgl.utils.text import brief, is_unicode

if TYPE_CHECKING:  # the API's process checks, and has no tokenizer
    from minisgl.core import SamplingParams
    from minisgl.tokenizer import Tokenizer

MAX_LOGIT_BIAS: Final = 1024
MAX_ALLOWED: Final = 2**18
"""As many as the largest vocabularies have. The server checks each, and answers nobody then."""
MAX_BAD_WORDS: Final = 256
MAX_BAD_WORD_LENGTH: Final = 256
MAX_BAD_WORD_IDS: Final = 4 * MAX_BAD_WORD_LENGTH + 4
_INT32: Final = 2**31 - 1


def _logit_bias(name: str, bias: Any) -> dict[int, float]:
    if isinstance(bias, dict) and len(bias) > MAX_LOGIT_BIAS:
        raise InvalidSampling(
            f"{name} may have at most {MAX_LOGIT_BIAS} tokens, got {len(bias)}", param=name
        )
    if not isinstance(bias, dict) or not all(
        _is_token(token) and isinstance(value, int | float) and -100 <= value <= 100
        for token, value in bias.items()
    ):
        raise InvalidSampling(
            f"{name} must map token ids to numbers from -100 to 100, got {brief(bias)}", param=name
        )
    return {int(token): float(value) for token, value in bias.items()}


def _allowed_token_ids(name: str, allowed: Any) -> tuple[int, ...]:
    if isinstance(allowed, tuple | list) and len(allowed) > MAX_ALLOWED:
        raise InvalidSampling(
            f"{name} may have at most {MAX_ALLOWED} tokens, got {len(allowed)}", param=name
        )
    if not isinstance(allowed, tuple | list) or not all(map(_is_token, allowed)):
        raise InvalidSampling(
            f"{name} must be a tuple of token ids, got {brief(allowed)}", param=name
        )
    if not allowed:
        raise InvalidSampling(f"{name} must have a token; None allows all", param=name)
    return tuple(map(int, allowed))


def _bad_words(name: str, words: Any) -> tuple[str, ...]:
    if (
        not isinstance(words, tuple | list)
        or len(words) > MAX_BAD_WORDS
        or not all(isinstance(word, str) and len(word.strip()) > 0 for word in words)
        or any(len(word) > MAX_BAD_WORD_LENGTH for word in words)
    ):
        raise InvalidSampling(
            f"{name} must be a tuple of at most {MAX_BAD_WORDS} texts of 1 to "
            f"{MAX_BAD_WORD_LENGTH} characters, not all of them spaces, got {brief(words)}",
            param=name,
        )
    if not all(map(is_unicode, words)):
        raise InvalidSampling(f"{name} must be valid Unicode", param=name)
    return tuple(words)


def _bad_words_ids(name: str, sequences: Any) -> tuple[tuple[int, ...], ...]:
    """The bounds allow the ids of `bad_words`: two sequences for each word, with and without a
    space before it, of at most one token for each byte."""
    if (
        not isinstance(sequences, tuple | list)
        or len(sequences) > 2 * MAX_BAD_WORDS
        or not all(isinstance(ids, tuple | list) for ids in sequences)
        or not all(
            0 < len(ids) <= MAX_BAD_WORD_IDS and all(map(_is_token, ids)) for ids in sequences
        )
    ):
        raise InvalidSampling(
            f"{name} must be a tuple of at most {2 * MAX_BAD_WORDS} tuples of 1 to "
            f"{MAX_BAD_WORD_IDS} token ids, got {brief(sequences)}",
            param=name,
        )
    return tuple(tuple(map(int, ids)) for ids in sequences)


def _is_token(value: Any) -> bool:
    is_integer = isinstance(value, Integral) and not isinstance(value, bool)
    return is_integer and 0 <= int(value) <= _INT32


CHECKS: Final[Mapping[str, Callable[[str, Any], Any]]] = {
    "logit_bias": _logit_bias,
    "allowed_token_ids": _allowed_token_ids,
    "bad_words": _bad_words,
    "bad_words_ids": _bad_words_ids,
}
"""The checks of fields of `SamplingParams` that have other values than the defaults."""


def ids_of_bad_words(sampling: SamplingParams, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return `bad_words_ids` with the tokens of `bad_words`.

    A word has other tokens at the beginning of a line than behind a space, so both are added. The
    same text in yet other tokens is not found: a model rarely writes it so.
    """
    found = list(sampling.bad_words_ids)
    for word in sampling.bad_words:
        for text in (word, f" {word.lstrip(' ')}"):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            found += [ids] if ids and ids not in found else []
    return tuple(found)
