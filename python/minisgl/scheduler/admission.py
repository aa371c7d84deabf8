"""Admission: refuses a request that cannot be served, before it is queued."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Final

from minisgl.core import SamplingParams
from minisgl.core.image import Image, places_of
from minisgl.core.req import IdArray, Req
from minisgl.core.sampling import ONLY_EMBEDS
from minisgl.errors import CONTEXT_IS, InvalidRequest, InvalidSampling, PromptTooLong, ServerBusy
from minisgl.scheduler.config import SchedulerConfig
from minisgl.utils.text import counted, size_of
from minisgl.utils.turns import is_full

LEFT: Final = ", and at least one must be left for the answer"
MAX_PIXEL_BYTES: Final = 2**30
"""Of the images of all requests: 150 pictures of 1540 x 1540 pixels, the largest of Mistral 3."""


def admissible_max_tokens(
    config: SchedulerConfig,
    prompt: IdArray,
    sampling: SamplingParams,
    *,
    waiting: Sequence[Req] = (),
    key: int = 0,
    output: Sequence[int] = (),
) -> int:
    """Return the most output tokens of the request: its `max_tokens`, or as many as fit.

    waiting: the queue. key: the number of the request's API key. output: of an earlier engine.
    Raises RequestError, which states the limit, if the request can never fit or the queue is full.
    """
    num_prompt, asked = len(prompt), sampling.max_tokens
    is_unknown = max(sampling.logit_ids, default=-1) >= config.num_labels
    if config.is_encoder and (not sampling.pooling or is_unknown):
        raise InvalidRequest(ONLY_EMBEDS)
    if num_prompt == 0:
        raise InvalidRequest("the prompt is empty; send at least one token", param="prompt")
    bounds = [int(prompt.min()), int(prompt.max()), *output]
    low, high = min(bounds), max(bounds)
    if low < 0 or high >= config.vocab_size:
        raise InvalidRequest(
            f"prompt token ids must be between 0 and {config.vocab_size - 1}, "
            f"got {low if low < 0 else high}",
            param="prompt",
        )
    for name in ("stop_token_ids", "logit_ids"):
        if (highest := max(getattr(sampling, name), default=0)) >= config.vocab_size:
            raise InvalidSampling(
                f"{name} must be between 0 and {config.vocab_size - 1}, got {highest}", param=name
            )
    if sampling.changes_logits:
        _check_logit_ids(sampling, config.vocab_size, config.eos_ids)
    pool = config.num_pool_tokens
    limit = min(config.max_seq_len, pool)
    why, remedy = "", ""
    if config.max_seq_len > pool:
        why = " (the KV cache holds no more)"
        remedy = " (or serve with a higher --num-pages or --memory-ratio)"
    least = int(asked != 0)
    if num_prompt > limit - least:
        raise PromptTooLong(
            f"the prompt has {counted(num_prompt, 'token')}, but {CONTEXT_IS} {limit} tokens{why}"
            f"{LEFT if least else ''}; the prompt is too long, so shorten it{remedy}",
            limit=limit,
            got=num_prompt,
            param="prompt",
        )
    if asked is not None and num_prompt + asked > limit:
        raise PromptTooLong(
            f"the prompt has {counted(num_prompt, 'token')} and max_tokens asks for {asked} more, "
            f"{num_prompt + asked} in all, but {CONTEXT_IS} {limit} tokens{why}; "
            f"ask for at most {limit - num_prompt}{remedy}",
            limit=limit,
            got=num_prompt + asked,
            param="max_tokens",
        )
    most = config.max_queued
    if (
        most is not None
        and len(waiting) >= most
        and is_full(most, [req.order.key for req in waiting], key)
    ):
        raise ServerBusy(
            f"the queue is full with {counted(len(waiting), 'request')}; try again later, or raise "
            "--max-queued-requests"
        )
    max_tokens = limit - num_prompt if asked is None else asked
    if sampling.min_tokens > max_tokens:
        raise InvalidSampling(
            f"min_tokens must be from 0 to max_tokens, got {sampling.min_tokens}",
            param="min_tokens",
        )
    if output and len(output) >= max_tokens:
        raise InvalidRequest(
            f"{len(output)} of at most {max_tokens} output tokens are there already"
        )
    return max_tokens


def check_images(config: SchedulerConfig, images: Iterable[Image], others: Iterable[Req]) -> None:
    """Raise InvalidRequest if one of the images must be computed whole and cannot be, ServerBusy if
    their pixels and those of other requests take too much memory.

    A request keeps its pixels until it ends, because it may be retracted.
    """
    most = max((len(places_of(image)) for image in images if image.whole), default=0)
    if most > config.max_prefill_tokens:
        raise InvalidRequest(
            f"an image has {most:,} tokens, which a step must compute together, and it takes "
            f"{config.max_prefill_tokens:,} prompt tokens; serve with a higher "
            "--max-prefill-length",
            param="messages",
        )
    held = sum(image.num_bytes for req in others for image in req.images)
    if held + sum(image.num_bytes for image in images) > MAX_PIXEL_BYTES and held:
        raise ServerBusy(
            f"the images of other requests take {size_of(held)} of {size_of(MAX_PIXEL_BYTES)}; "
            "try again later"
        )


def _check_logit_ids(sampling: SamplingParams, vocab_size: int, eos_ids: Collection[int]) -> None:
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
