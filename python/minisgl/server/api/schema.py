"""The fields that requests of several API families have.

A family's request has each field of its vendor's schema. Each is honoured, neutral or refused
(`minisgl.server.strict`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self

import msgspec
from msgspec import Meta

from minisgl.core import SamplingParams
from minisgl.core.sampling import MAX_CHOICES
from minisgl.errors import InvalidRequest
from minisgl.message import Namespace, Priority, TokenPrompt, ids_to_bytes
from minisgl.server.api.structured import StructuredFields, alias_names, renamed
from minisgl.server.errors import in_turn, naming
from minisgl.server.strict import Json, ignored, only
from minisgl.utils.text import shortened

NonNegative = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Place = Annotated[Priority | None, Meta(description="Lower is served first; the default is 0.")]
Salt = Annotated[
    Namespace | None, Meta(description="Only requests with the same salt share cached prefixes.")
]
Timeout = Annotated[
    Annotated[float, Meta(ge=0.001, le=86400)] | None,
    Meta(description="Seconds after which the request ends with an error."),
]
Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
CacheOptions = Annotated[
    dict[str, Any] | None, only({"mode": "implicit"}, why="prefixes are cached without it")
]
CacheRetention = Annotated[
    str | None, ignored("Changes nothing: prefixes are kept while the KV pool has room.")
]
CacheKey = Annotated[
    str | None, ignored("Changes nothing: equal prefixes are found without a key.")
]
Moderation = Annotated[dict[str, Any] | None, only(why="moderate texts in a separate request")]
TopK = Annotated[int, Meta(ge=-1, le=2**31 - 1, description="0 and -1 are for all tokens.")]


class StreamOptions(Json, frozen=True, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: Annotated[
        bool | None, Meta(description="With include_usage: each chunk has the usage so far.")
    ] = None
    include_obfuscation: Annotated[
        bool | None, only(False, why="chunks are not padded; use TLS record padding in a proxy")
    ] = None


class SamplingFields(StructuredFields, frozen=True, kw_only=True):
    """The fields of all families. A field that is left out takes the checkpoint's default."""

    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    max_tokens: Positive | None = None
    n_predict: Annotated[
        Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None,
        Meta(description="The same as max_tokens, llama.cpp's name; -1: left out."),
    ] = None
    stream: bool | None = None

    # Extensions to OpenAI's schema, named as elsewhere in the field.
    top_k: TopK | None = None
    min_p: float | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[NonNegative] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: Annotated[
        Positive | None,
        Meta(description="Keep at most this many tokens, the last ones."),
    ] = None
    cache_prompt: Annotated[
        bool | None, only(True, why="prefixes are always cached; cache_salt keeps yours apart")
    ] = None
    max_tokens_policy: Annotated[
        Literal["clamp"] | None,
        Meta(description="clamp: max_tokens is lowered to what the context leaves."),
    ] = None
    timeout: Timeout = None
    priority: Place = None
    cache_salt: Salt = None

    def checked(self) -> Self:
        """Return the request with our names of its fields (`ALIASES`)."""
        return renamed(super().checked())

    def sampling_fields(self) -> dict[str, Any]:
        """Return the fields of `SamplingParams` that the request gives, by name. Families add what
        they name or mean otherwise. Raises InvalidRequest."""
        given = {
            name: tuple(value) if isinstance(value, list) else value
            for name in _SAMPLING_FIELDS
            if (value := getattr(self, name, None)) is not None
        }
        if isinstance(self.stop, str):
            given["stop"] = (self.stop,)
        return given

    def params(
        self, defaults: SamplingParams, names: Mapping[str, str] | None = None
    ) -> tuple[SamplingParams, dict[str, str]]:
        """Return `defaults` with the values and the form of the request, and the request's names of
        the fields that a later refusal can name.

        names: the family's names of fields, by their names in chat completions. Raises
        InvalidRequest.
        """
        theirs = alias_names(self)
        names = {**theirs, **(names or {})}
        with naming(names):
            params = defaults.but(**self.sampling_fields())
            option, of_form = self.structured()
            if option is not None:
                with naming(of_form):
                    params = params.but(structured_outputs=option)
        return params, {**theirs, **in_turn(of_form, names)}


_TOKEN_ID: Final = re.compile("[0-9]{1,10}")
_SAMPLING_FIELDS: Final = tuple(
    name for name in SamplingParams.__struct_fields__ if name != "structured_outputs"
)
"""A request's field of the same name has the same meaning; the form has several fields."""


class OpenAIFields(SamplingFields, frozen=True, kw_only=True):
    """The fields that OpenAI's chat completions and text completions have in common."""

    model: Annotated[
        str | None,
        Meta(
            description="The served model's name, or that of a LoRA adapter; left out, it is the "
            "served model."
        ),
    ] = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    user: Annotated[str | None, ignored("Changes nothing.")] = None

    repetition_penalty: float | None = None
    repeat_penalty: Annotated[
        float | None, Meta(description="The same as repetition_penalty, llama.cpp's name.")
    ] = None
    min_tokens: NonNegative | None = None
    allowed_token_ids: list[NonNegative] | None = None

    # Clients of other engines send these, mostly with a value that changes nothing.
    length_penalty: Annotated[float | None, only(1, why="there is no beam search")] = None
    use_beam_search: Annotated[
        bool | None, only(False, why="there is no beam search; use temperature 0")
    ] = None
    bad_words: Annotated[
        list[str] | None, Meta(description="Texts whose tokens the output does not have.")
    ] = None
    return_token_ids: Annotated[
        bool | None, Meta(description="Report the ids of the output tokens with each choice.")
    ] = None
    return_tokens_as_token_ids: Annotated[bool | None, only(False, why="use return_token_ids")] = (
        None
    )
    spaces_between_special_tokens: Annotated[
        bool | None, only(True, why="text is decoded as the tokenizer does; see token_ids")
    ] = None

    def sampling_fields(self) -> dict[str, Any]:
        given = super().sampling_fields()
        if self.logit_bias:
            if not all(_TOKEN_ID.fullmatch(token) for token in self.logit_bias):
                raise InvalidRequest("the keys of logit_bias must be token ids", param="logit_bias")
            given["logit_bias"] = {int(token): bias for token, bias in self.logit_bias.items()}
        return given

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk. Raises InvalidRequest without `stream`."""
        if self.stream_options is None:
            return False
        if not self.stream:
            raise InvalidRequest(
                "stream_options is allowed only together with stream=true", param="stream_options"
            )
        self.stream_options.refuse_unsupported("stream_options.")
        return bool(self.stream_options.include_usage)


def token_prompt(ids: list[Any] | None, path: str) -> TokenPrompt:
    """Return the prompt of these ids. path: of their field.

    Raises InvalidRequest unless they are non-negative int32; the tokenizer checks that they are in
    the vocabulary.
    """
    if not ids:
        raise InvalidRequest(f"{path} has no token ids", param=path)
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < 2**31:
        return TokenPrompt(ids=ids_to_bytes(ids))
    for index, token in enumerate(ids):  # in Python, so only to find the wrong one
        if type(token) is not int or not 0 <= token < 2**31:
            got = shortened(msgspec.json.encode(token).decode(), 100)
            raise InvalidRequest(f"{path}[{index}] must be a token id, got {got}", param=path)
    raise AssertionError("one of them is no token id")
