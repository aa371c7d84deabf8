"""The sampling parameters of a request: how its next token is chosen, and when it ends.

Fields that have other values than the defaults are checked. A check returns the value as Python's
own type, because numbers of other libraries, such as NumPy, may overflow and cannot be encoded for
another process. It raises InvalidSampling, which names the field, the given value and the allowed
ones.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from functools import partial
from math import inf
from numbers import Integral, Real
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from minisgl import plugins
from minisgl.errors import InvalidSampling
from minisgl.utils.text import brief, is_unicode

MAX_CHOICES = 128
"""The most choices of one prompt. They have the same parameters, but for the seed."""

MAX_TOP_LOGPROBS: Final = 20
MAX_STOP_STRINGS: Final = 16
MAX_STOP_TOKEN_IDS: Final = 256
MAX_STOP_LENGTH: Final = 1024  # characters; the detokenizer holds back this much text at most
KINDS: Final = ("json", "json_object", "regex", "choice", "grammar")
"""The entries of `structured_outputs`, of which a request has one."""
INT32: Final = 2**31 - 1

Count = Annotated[int, Meta(ge=0, le=INT32)]
"""A number or an id of tokens, which the device keeps as int32."""
ONLY_EMBEDS: Final = (
    "this model is an encoder: it embeds texts (/v1/embeddings, LLM.embed) or scores pairs "
    "(/rerank, LLM.score), and writes none; serve a chat model for that"
)
PoolingKind = Literal["last", "mean", "cls"]
NumTop = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]


class _Checked(msgspec.StructMeta):
    def __call__(cls, *args: Any, **fields: Any) -> Any:
        """Make a record, checked. Raises InvalidSampling."""
        known: tuple[str, ...] = cls.__struct_fields__
        if args or (unknown := [name for name in fields if name not in known]):
            wrong = "values without a name" if args else ", ".join(unknown)
            hint = "n is an argument of generate, chat and stream; " if wrong == "n" else ""
            says = f"SamplingParams has no field for {wrong}; {hint}the fields are "
            raise InvalidSampling(says + ", ".join(known))
        given = {name: fields[name] for name in fields if fields[name] is not _DEFAULTS[name]}
        return super().__call__(**_checked(given))


class SamplingParams(
    msgspec.Struct,
    metaclass=_Checked,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
):
    """How one request samples and stops. The values are checked when the record is made, and only
    then. Another process decodes them, which keeps the types and bounds of the fields, and trusts
    the rest.

    The filters apply in this order, as in Hugging Face's `generate`: temperature, top-k, top-p,
    min-p. Each renormalises the probabilities that the one before has left. ``temperature=0`` is
    greedy and ignores the filters. Noise is a function of (seed, index of the output token,
    vocabulary id) only, so equal logits and an equal seed give equal text in any batch.

    temperature: 0 to 2. top_k: 1 to 2**31 - 1; 0 or -1 for all. top_p: above 0, to 1.
    min_p: 0 to 1. seed: any 64-bit integer; if it is None, the server or `LLM` draws one.
    max_tokens: the most output tokens; None is as many as the context and the KV pool leave. 0 is
    allowed with `prompt_logprobs` or `echo`, and the value with `pooling`.
    ignore_eos: do not end at the model's end-of-sequence tokens.
    stop_token_ids: also end at these, at most 256; they are in the ids, but not in the text.
    stop: end at one of these strings, and cut the text before it; at most 16, of at most 1,024
    characters each.
    skip_special_tokens: leave special tokens out of the text.
    include_stop_str_in_output: the text includes the stop string that ended it.
    logprobs: report the log-probability of each output token in the model's own distribution,
    before temperature and filters. top_logprobs: also report this many of the most likely tokens at
    each position, at most 20.
    prompt_logprobs: report the log-probability of each prompt token except the first, and this many
    of the most likely tokens at its position, 0 to 20; None reports neither. The whole prompt is
    then computed, even if the prefix cache has it.
    echo: the text begins with the prompt.
    truncate_prompt_tokens: keep at most this many tokens of the prompt, the last ones. With
    `pooling` the first ones, and a special token at the end.
    pooling: report the prompt's pooled hidden state, of the last token, of the first ("cls") or the
    mean of all, and no output (`minisgl_zoo.pooling`). logit_ids: report the logits of these tokens
    instead of the hidden state.

    These change the logits, before temperature and filters and also for greedy requests:
    repetition_penalty: divides the positive logits of the tokens in prompt and output, multiplies
    the negative ones; 0.01 to 10. frequency_penalty, presence_penalty: subtracted from the logits
    of the output's tokens, for each occurrence and once; -2 to 2. logit_bias: token id -> the
    number that is added to its logit, -100 to 100, at most 1,024 tokens. allowed_token_ids: no
    other token is sampled. bad_words_ids: sequences of tokens that must not appear in the output:
    the last token of a sequence is not sampled after its others. bad_words: texts whose tokens
    become such sequences, with and without a space before them; at most 256 texts of at most 256
    characters. min_tokens: no end-of-sequence or stop token is sampled before this many output
    tokens. structured_outputs: the answer's form, a dictionary with one of `json` (a JSON schema),
    `json_object` (True), `regex`, `choice` (a list of texts) and `grammar` (Lark or GBNF). The
    output follows it, and the model's end of sequence is sampled only where the form is complete.

    Raises InvalidSampling, which names the field, the given value and the allowed values; also for
    a wrong type, because ``stop="abc"`` would otherwise stop at each of the three letters.
    """

    temperature: float = 1.0
    top_k: Count = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: Count | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[Count, ...] = ()
    stop: tuple[Annotated[str, Meta(min_length=1)], ...] = ()
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logprobs: bool = False
    top_logprobs: NumTop = 0
    prompt_logprobs: NumTop | None = None
    echo: bool = False
    truncate_prompt_tokens: Annotated[int, Meta(ge=1)] | None = None
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[Count, float] = {}
    allowed_token_ids: tuple[Count, ...] | None = None
    bad_words: tuple[str, ...] = ()
    bad_words_ids: tuple[Annotated[tuple[Count, ...], Meta(min_length=1)], ...] = ()
    min_tokens: Count = 0
    structured_outputs: dict[str, Any] | None = None
    pooling: PoolingKind | Literal[""] = ""
    logit_ids: tuple[Count, ...] = ()

    def but(self, **fields: Any) -> SamplingParams:
        """Return the parameters with other values of these fields. Raises InvalidSampling."""
        return SamplingParams(**(msgspec.structs.asdict(self) | fields))

    @property
    def has_penalties(self) -> bool:
        """Whether the logits depend on the tokens so far."""
        penalties = (self.repetition_penalty - 1, self.frequency_penalty, self.presence_penalty)
        return any(penalties)

    @property
    def changes_logits(self) -> bool:
        """Whether an option changes the model's logits before temperature and filters."""
        others = (self.logit_bias, self.allowed_token_ids, self.min_tokens, self.bad_words_ids)
        return self.has_penalties or any(others)

    @property
    def shows_prompt(self) -> bool:
        """Whether the output has text or log-probabilities of the prompt."""
        return self.echo or self.prompt_logprobs is not None

    def with_seed(self, choice: int = 0) -> SamplingParams:
        """Return the parameters of a choice: without a seed a random one, else the seed + `choice`
        (docs/api.md)."""
        if self.seed is not None and not choice:
            return self
        seed = secrets.randbits(63) if self.seed is None else (self.seed + choice) % 2**64
        return msgspec.structs.replace(self, seed=seed)

    def kept(self, ids: bytes) -> bytes:
        """Return the part of a prompt, int32 ids, that `truncate_prompt_tokens` keeps."""
        most = self.truncate_prompt_tokens
        return ids if most is None else ids[-4 * most :]


_DEFAULTS = {each.name: each.default for each in msgspec.structs.fields(SamplingParams)}


def _checked(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that are given, by name, of Python's own types."""
    plain = {name: _CHECKS[name](name, value) for name, value in given.items()}
    if plain.get("top_logprobs") and not plain.get("logprobs"):
        raise InvalidSampling("top_logprobs needs logprobs=True", param="top_logprobs")
    if plain.get("pooling"):
        plain |= _of_package("pooling", "pooling", "checked")(plain)
    elif plain.get("logit_ids"):
        raise InvalidSampling("logit_ids needs pooling, last or cls", param="logit_ids")
    shows_prompt = (
        plain.get("pooling") or plain.get("echo") or plain.get("prompt_logprobs") is not None
    )
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
    if not is_list or any(not isinstance(x, kind) or isinstance(x, bool) for x in values):
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
    "min_tokens": _whole(-inf, inf),  # `_checked` compares it with max_tokens
    "structured_outputs": lambda name, value: value,  # `_checked` compares it with other fields
    "pooling": lambda name, value: value,  # and this
    "logit_ids": _stop_token_ids,
}
