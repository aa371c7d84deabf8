"""Log-probabilities of tokens in the forms of OpenAI's chat and text completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from minisgl.message import PromptToken, TokenText
from minisgl.server.strict import Json


class TopLogprob(Json, frozen=True, kw_only=True):
    token: str
    bytes: list[int]
    logprob: float


class TokenLogprob(TopLogprob, frozen=True, kw_only=True):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Json, frozen=True, kw_only=True):
    """One entry for each output token, including an end of sequence."""

    content: list[TokenLogprob]
    refusal: None = None

    @classmethod
    def of(cls, tokens: Sequence[TokenText], logprobs: Sequence[float]) -> Self:
        return cls(
            content=[
                TokenLogprob(
                    token=token_name(token.data),
                    bytes=list(token.data),
                    logprob=logprob,
                    top_logprobs=[
                        TopLogprob(token=token_name(data), bytes=list(data), logprob=other)
                        for _, data, other in token.top
                    ],
                )
                for token, logprob in zip(tokens, logprobs, strict=True)
            ]
        )


class TextLogprobs(Json, frozen=True, kw_only=True):
    """Lists with one entry for each output token, including an end of sequence. With `echo` the
    tokens of the prompt come first, and the very first has no log-probability.

    text_offset: the characters of the choice's text before the token.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]

    @classmethod
    def of(
        cls,
        tokens: Sequence[TokenText],
        logprobs: Sequence[float],
        prompt: Sequence[PromptToken] = (),
    ) -> Self:
        whole = [*prompt, *tokens]
        token_logprobs = [*(token.logprob for token in prompt), *logprobs]
        return cls(
            tokens=[token_name(token.data) for token in whole],
            token_logprobs=token_logprobs,
            top_logprobs=[
                None if logprob is None else _top(token, logprob)
                for token, logprob in zip(whole, token_logprobs, strict=True)
            ],
            text_offset=[token.offset for token in whole],
        )


class TokenChance(Json, frozen=True, kw_only=True):
    id: int
    logprob: float


class PromptLogprob(Json, frozen=True, kw_only=True):
    """A token of the prompt. logprob: null for the first. top: the most likely tokens at its
    position."""

    id: int
    logprob: float | None
    top: list[TokenChance]

    @classmethod
    def of(cls, token: PromptToken) -> Self:
        top = [TokenChance(id=id, logprob=logprob) for id, _, logprob in token.top]
        return cls(id=token.id, logprob=token.logprob, top=top)


def _top(token: TokenText, logprob: float) -> dict[str, float]:
    """Return the log-probabilities by text, of the likeliest tokens and of `token` itself, which is
    the least likely of them if it is not one of the likeliest. If tokens have the same text, the
    likeliest counts."""
    top = {token_name(data): other for _, data, other in reversed(token.top)}
    top.setdefault(token_name(token.data), logprob)
    return top


def token_name(data: bytes) -> str:
    """Return the text of a token. If it is a part of a character, return its bytes in OpenAI's
    form."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
