"""Checks the fields of `SamplingParams` that have other values than the defaults.

A check returns the value as Python's own type, because numbers of other libraries, such as NumPy,
may overflow and cannot be encoded for another process. It raises InvalidSampling, which names the
field, the given value and the allowed ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import inf
from numbers import Integral, Real
from typing import Any, Final

from minisgl import plugins
from minisgl.errors import InvalidSampling
from minisgl.utils.text import brief, is_unicode

MAX_TOP_LOGPROBS: Final = 20
MAX_STOP_STRINGS: Final = 16
MAX_STOP_TOKEN_IDS: Final = 256
MAX_STOP_LENGTH: Final = 1024  # characters; the detokenizer holds back this much text at most
KINDS: Final = ("json", "json_object", "regex", "choice", "grammar")
"""The entries of `structured_outputs`, of which a request has one."""
INT32: Final = 2**31 - 1


def checked(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that are given, by name, of Python's own types."""
    plain = {name: _CHECKS[name](name, value) for name, value in given.items()}
    if plain.get("top_logprobs") and not plain.get("logprobs"):
        raise InvalidSampling("top_logprobs needs logprobs=True", param="top_logprobs")
    shows_prompt = plain.get("echo") or plain.get("prompt_logprobs") is not None
    max_tokens = plain.get("max_tokens")
    if max_tokens == 0 and not shows_prompt:
        raise InvalidSampling(
            f"max_tokens must be from 1 to {INT32}; 0 is allowed with echo or prompt_logprobs",
            param="max_tokens",
        )
    min_tokens = plain.get("min_tokens", 0)
    if not 0 <= min_tokens <= (INT32 if max_tokens is None else max_tokens):
        raise InvalidSampling(
            f"min_tokens must be from 0 to max_tokens, got {min_tokens}", param="min_tokens"
        )
    if plain.get("structured_outputs") is not None:
        check = _of_package("structured_outputs", "grammars", "check")
        plain["structured_outputs"] = check(plain)
    return plain


def _of_package(name: str, table: str, row: str) -> Any:
    """Return a package's check of an option. Raises InvalidSampling if the package is absent."""
    found = plugins.find(table, row)
    if found is None:
        raise InvalidSampling(f"{name} {plugins.absent(table)}; leave it out", param=name)
    return found


_NUMBERS: Final[Mapping[type, tuple[Any, str]]] = {
    float: (Real, "a number"),
    int: (Integral, "a whole number"),
}
"""What becomes a number of Python's own, and its name in an error."""


def _number(kind: type, low: float, high: float, allowed: str, name: str, value: Any) -> Any:
    """Check a number. kind: float or int, which it becomes. allowed: says which values are."""
    if type(value) is not kind:
        numbers, expected = _NUMBERS[kind]
        if not isinstance(value, numbers) or isinstance(value, bool):
            raise InvalidSampling(f"{name} must be {expected}, got {brief(value)}", param=name)
        try:
            value = kind(value)
        except OverflowError:
            raise InvalidSampling(f"{name} is out of range", param=name) from None
    if not low <= value <= high:  # NaN is not
        raise InvalidSampling(f"{name} must {allowed}, got {brief(value)}", param=name)
    return value


def _real(low: float, high: float, allowed: str = "") -> Callable[[str, Any], Any]:
    return partial(_number, float, low, high, allowed or f"be between {low:g} and {high:g}")


def _whole(low: float, high: float, allowed: str = "") -> Callable[[str, Any], Any]:
    return partial(_number, int, low, high, allowed or f"be from {low} to {high}")


def _or_none(check: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    return lambda name, value: None if value is None else check(name, value)


_TOP_K = _whole(-1, INT32, f"be from 1 to {INT32}, or 0 or -1 for no limit")


def _top_k(name: str, value: Any) -> Any:
    return max(_TOP_K(name, value), 0)


def _switch(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidSampling(f"{name} must be True or False, got {brief(value)}", param=name)
    return value


def _tuple(name: str, values: Any, items: str, kind: type, most: int) -> Any:
    """Return a tuple or list of at most `most` values of a kind."""
    is_list = isinstance(values, tuple | list)
    if is_list and len(values) > most:
        raise InvalidSampling(
            f"{name} may have at most {most} {items}, got {len(values)}", param=name
        )
    if not is_list or not all(isinstance(value, kind) for value in values):
        raise InvalidSampling(f"{name} must be a tuple of {items}, got {brief(values)}", param=name)
    return values


def _stop_token_ids(name: str, values: Any) -> tuple[int, ...]:
    ids = tuple(map(int, _tuple(name, values, "token ids", Integral, MAX_STOP_TOKEN_IDS)))
    if any(not 0 <= token <= INT32 for token in ids):
        raise InvalidSampling(f"{name} must be token ids, got {brief(list(ids))}", param=name)
    return ids


def _stop(name: str, values: Any) -> tuple[str, ...]:
    texts = tuple(map(str, _tuple(name, values, "strings", str, MAX_STOP_STRINGS)))
    for text in texts:
        if not 0 < len(text) <= MAX_STOP_LENGTH:
            raise InvalidSampling(
                f"a stop string must have 1 to {MAX_STOP_LENGTH} characters, "
                f"got one of {len(text)}",
                param=name,
            )
        if not is_unicode(text):
            raise InvalidSampling(
                f"a stop string must be valid Unicode, got {brief(text)}", param=name
            )
    return texts


def _logit_option(name: str, value: Any) -> Any:
    if value == {}:  # the default of logit_bias, of which each record has its own
        return value
    return _of_package(name, "logit_options", "checks")[name](name, value)


_CHECKS: Final[Mapping[str, Callable[[str, Any], Any]]] = {
    "temperature": _real(0, 2),
    "top_k": _top_k,
    "top_p": _real(5e-324, 1, "be above 0 and at most 1"),
    "min_p": _real(0, 1),
    "seed": _or_none(_whole(-(2**63), 2**64 - 1, "fit 64 bits")),
    "max_tokens": _or_none(_whole(0, INT32, f"be from 1 to {INT32}")),
    "ignore_eos": _switch,
    "stop_token_ids": _stop_token_ids,
    "stop": _stop,
    "skip_special_tokens": _switch,
    "include_stop_str_in_output": _switch,
    "logprobs": _switch,
    "top_logprobs": _whole(0, MAX_TOP_LOGPROBS),
    "prompt_logprobs": _or_none(_whole(0, MAX_TOP_LOGPROBS)),
    "echo": _switch,
    "truncate_prompt_tokens": _or_none(_whole(1, INT32, "be at least 1")),
    "repetition_penalty": _real(0.01, 10),
    "frequency_penalty": _real(-2, 2),
    "presence_penalty": _real(-2, 2),
    "logit_bias": _logit_option,
    "allowed_token_ids": _logit_option,
    "bad_words": _logit_option,
    "bad_words_ids": _logit_option,
    "min_tokens": _whole(-inf, inf),  # `checked` compares it with max_tokens
    "structured_outputs": lambda name, value: value,  # `checked` compares it with other fields
}
