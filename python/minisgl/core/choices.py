"""Several choices of one prompt: the same ids, with seeds that differ."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from minisgl.core.sampling import SamplingParams
from minisgl.errors import InvalidRequest, brief

MAX_CHOICES = 128


def seed_of(seed: int, choice: int) -> int:
    """Return the seed of choice `choice` of a request. docs/api.md has the formula."""
    return (seed + choice) % 2**64


def choices_of(
    prompts: Sequence[bytes], params: Sequence[SamplingParams], n: int
) -> tuple[list[bytes], list[SamplingParams]]:
    """Return each prompt n times in a row, with its params. Without a seed, each choice draws its
    own. Raises InvalidRequest if n is not from 1 to `MAX_CHOICES`.
    """
    if type(n) is not int or not 1 <= n <= MAX_CHOICES:
        raise InvalidRequest(f"n must be 1 to {MAX_CHOICES}, got {brief(n)}", param="n")
    return [ids for ids in prompts for _ in range(n)], [
        sampling
        if sampling.seed is None
        else msgspec.structs.replace(sampling, seed=seed_of(sampling.seed, choice))
        for sampling in params
        for choice in range(n)
    ]
