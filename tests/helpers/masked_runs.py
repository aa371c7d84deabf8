"""Requests whose tokens are masked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from helpers.engine_runs import (
    VOCAB,
    Request,
    greedy,
    make_scheduler,
    prompts,
)
from minisgl.core.req import Mask, Masker
from minisgl.engine import Engine
from minisgl.message import UserMsg
from minisgl.scheduler import Scheduler

NUM_TOKENS = 24


def allowed_tokens(output: Sequence[int]) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return bool [V]: a third of the vocabulary, which depends on the whole output."""
    return (np.arange(VOCAB) + 5 * sum(output) + len(output)) % 3 == 0


class ThirdMasker:
    def mask(self, output: Sequence[int], drafts: Sequence[int] = ()) -> Mask:
        bits = np.zeros(-(-VOCAB // 32) * 32, np.bool_)
        bits[:VOCAB] = allowed_tokens([*output, *drafts])
        return np.packbits(bits, bitorder="little").view(np.uint32)

    def forced(self, output: Sequence[int]) -> Sequence[int]:
        return ()


def create_masker(message: UserMsg) -> Masker | None:
    """Two of three requests have masks."""
    return ThirdMasker() if message.uid % 3 else None


def masked_scheduler(engine: Engine, **options: Any) -> Scheduler:
    scheduler = make_scheduler(engine, **options)
    scheduler._create_masker = create_masker
    return scheduler


def requests() -> list[Request]:
    return [(prompt, greedy(NUM_TOKENS)) for prompt in prompts(6)]
