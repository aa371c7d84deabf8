"""What the answers of chat completions, of text completions and of /generate have in common."""

from __future__ import annotations

import time
import uuid
from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, Self

from msgspec import UNSET, Struct, UnsetType

from minisgl.core import Finished
from minisgl.message import PromptToken, TextReply, TokenText, ids_from_bytes
from minisgl.server.api.schema import OpenAIFields
from minisgl.server.strict import Json
from minisgl.server.web.respond import DONE, Output, Shape, TextEvent, event


class PromptTokensDetails(Json, frozen=True, kw_only=True):
    cached_tokens: int


class CompletionTokensDetails(Json, frozen=True, kw_only=True):
    """reasoning_tokens: these include the marks before and after the reasoning. The last two count
    drafts, also those that no `prediction` was the source of; left out if there were none. Rejected
    ones are no output tokens.
    """

    reasoning_tokens: int
    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET


class Usage(Json, frozen=True, kw_only=True):
    """Counts of tokens. Whole answers and the end of a stream have the details."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET

    @classmethod
    def of(cls, ends: list[Finished], num_choices: int = 1) -> Self:
        """Return the sum over a call's prompts.

        ends: of the choices of the first prompt, then of the second, and so on. A prompt counts
        once; its cached tokens are the fewest that any of its choices found.
        """
        prompts = [ends[at : at + num_choices] for at in range(0, len(ends), num_choices)]
        num_prompt = sum(choices[0].num_prompt_tokens for choices in prompts)
        num_output = sum(end.num_output_tokens for end in ends)
        num_reasoning = sum(end.num_reasoning_tokens for end in ends)
        num_drafted = sum(end.num_drafted for end in ends)
        num_accepted = sum(end.num_accepted for end in ends)
        return cls(
            prompt_tokens=num_prompt,
            completion_tokens=num_output,
            total_tokens=num_prompt + num_output,
            prompt_tokens_details=PromptTokensDetails(
                cached_tokens=sum(
                    min(end.num_cached_tokens for end in choices) for choices in prompts
                )
            ),
            completion_tokens_details=CompletionTokensDetails(
                reasoning_tokens=num_reasoning,
                accepted_prediction_tokens=num_accepted if num_drafted else UNSET,
                rejected_prediction_tokens=num_drafted - num_accepted if num_drafted else UNSET,
            ),
        )


class Timings(Json, frozen=True, kw_only=True):
    """The scheduler's measurements of a call's prompts. Seconds are on its clock.

    Three phases follow one another: queued, until the first launch; prefill, until the first token;
    decode, until the end. device_s, energy_j: the prompts' parts of their steps, if energy can be
    read. prefix_differs_at: see `Finished`; of the prompt that took longest. resumed: how often
    another engine went on with a prompt; left out if none did. num_images, num_images_computed,
    images_s: see `Finished.images`; left out without images.
    """

    queued_s: float
    prefill_s: float
    decode_s: float
    num_cached_tokens: int
    prefix_differs_at: int | None
    num_chunks: int
    num_retractions: int
    num_drafted: int
    num_accepted: int
    device_s: float | UnsetType = UNSET
    energy_j: float | UnsetType = UNSET
    resumed: int | UnsetType = UNSET
    num_images: int | UnsetType = UNSET
    num_images_computed: int | UnsetType = UNSET
    images_s: float | UnsetType = UNSET

    @classmethod
    def of(cls, ends: list[Finished]) -> Self:
        """Return the phases of the prompt that took longest, with the sums of all counts."""
        costs = [end.cost for end in ends if end.cost]
        images = [end.images for end in ends if end.images]
        longest = max(ends, key=lambda end: end.queued_s + end.prefill_s + end.decode_s)
        return cls(
            queued_s=round(longest.queued_s, 6),
            prefill_s=round(longest.prefill_s, 6),
            decode_s=round(longest.decode_s, 6),
            num_cached_tokens=sum(end.num_cached_tokens for end in ends),
            prefix_differs_at=longest.prefix_differs_at,
            num_chunks=sum(end.num_chunks for end in ends),
            num_retractions=sum(end.num_retractions for end in ends),
            num_drafted=sum(end.num_drafted for end in ends),
            num_accepted=sum(end.num_accepted for end in ends),
            device_s=round(sum(device_s for device_s, _ in costs), 6) if costs else UNSET,
            energy_j=round(sum(joules for _, joules in costs), 6) if costs else UNSET,
            resumed=sum(end.num_resumed for end in ends) or UNSET,
            num_images=sum(num for num, _, _ in images) or UNSET,
            num_images_computed=sum(num for _, num, _ in images) if images else UNSET,
            images_s=round(sum(seconds for _, _, seconds in images), 6) if images else UNSET,
        )


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


class OpenAIShape(Shape):
    """A `Shape` whose answers have an id, a time and a model. Mutable: it counts tokens.

    chunk_type: the record of an event. nothing: the content of a chunk that has none.
    """

    chunk_type: ClassVar[type[Struct]]
    nothing: ClassVar[Any]

    def __init__(self, prefix: str, model: str, asked: OpenAIFields, *, has_logprobs: bool) -> None:
        """prefix: of the id. has_logprobs: report each token's log-probability."""
        self._head: dict[str, Any] = {
            "id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model
        }  # fmt: skip
        self._num_choices = asked.n or 1
        self._include_usage = asked.include_usage
        options = asked.stream_options
        # Whether each chunk has the usage so far.
        self._is_continuous = bool(
            self._include_usage and options and options.continuous_usage_stats
        )
        self._num_prompt = self._num_output = 0  # tokens of a stream so far
        self._has_logprobs = has_logprobs
        self._has_ids = self.returns_ids = bool(asked.return_token_ids)
        self._shown: set[int] = set()
        self._texts: dict[int, TextEvent] = {}  # by choice

    def _only_text(self, index: int, text: str) -> bytes:
        """Return the event of a chunk that has no more than text."""
        if index not in self._texts:
            self._texts[index] = TextEvent(partial(self._text_chunk, index))
        return self._texts[index](text)

    @abstractmethod
    def _text_chunk(self, index: int, text: str) -> Struct:
        """Return the chunk of more text."""

    @abstractmethod
    def _chunk(
        self, index: int, content: Any, end: Finished | None = None, reply: TextReply | None = None
    ) -> Struct:
        """Return a chunk with this content. reply: the output whose details it has."""

    @abstractmethod
    def _logprobs_of(self, output: Output | TextReply) -> Struct:
        """Return the log-probabilities of the output's tokens."""

    def opening(self, num_prompt_tokens: int) -> bytes:
        self._num_prompt = num_prompt_tokens // self._num_choices  # a prompt counts once
        return b""

    def end(self, index: int, end: Finished) -> bytes:
        return event(self._chunk(index, self.nothing, end))

    def closing(self, ends: list[Finished]) -> bytes:
        if not self._include_usage:
            return DONE
        return event(self.chunk_type(**self._head, choices=[], **self._totals(ends))) + DONE

    @property
    def _has_details(self) -> bool:
        """Whether each chunk has more than text."""
        return self._has_logprobs or self._has_ids or self._is_continuous

    def _count(self, reply: TextReply) -> None:
        self._num_output += len(reply.token_ids)

    def _choice(
        self, index: int, end: Finished | None, shown: Output | TextReply | None
    ) -> dict[str, Any]:
        """Return the fields of a choice beside its content. shown: whose details it has."""
        return {
            "index": index,
            "finish_reason": end.reason if end else None,
            "stop_reason": end.stop_match if end else UNSET,
            "logprobs": self._logprobs_of(shown) if shown and self._has_logprobs else None,
            "token_ids": shown.token_ids if shown and self._has_ids else UNSET,
        }

    def _prompt_ids(self, index: int) -> list[int] | UnsetType:
        """Return the ids of prompt `index`, the first time."""
        if index in self._shown or index not in self.prompt_ids or not self._has_ids:
            return UNSET
        self._shown.add(index)
        ids: list[int] = ids_from_bytes(self.prompt_ids[index]).tolist()
        return ids

    def _so_far(self, end: Finished | None) -> dict[str, Any]:
        """Return the usage and the timings of a chunk that is not the last."""
        usage: Usage | UnsetType | None = None if self._include_usage else UNSET
        if self._is_continuous:
            usage = Usage(
                prompt_tokens=self._num_prompt,
                completion_tokens=self._num_output,
                total_tokens=self._num_prompt + self._num_output,
            )
        return {"usage": usage, "timings": Timings.of([end]) if end else UNSET}

    def _totals(self, ends: list[Finished]) -> dict[str, Any]:
        return {"usage": Usage.of(ends, self._num_choices), "timings": Timings.of(ends)}
