"""The workloads of the tables: the lengths of requests that all arrive at once.

throughput   256 requests, 100 to 1,024 tokens in and out
streams      64, 512 in, 256 out
single       one, 128 in, 512 out
mixed        32, every fourth 6,000 in and 64 out, the others 200 in and 200 out
prefill      32, 4,096 in, 1 out
shared       128, 4,160 in, 32 out; the first 4,096 tokens are common
long         8, 32,768 in, 256 out
batchN       N, 128 in, 256 out

throughput samples at temperature 0.6, the others are greedy.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import numpy as np

from minisgl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """requests: (prompt, output) lengths. shared: the length of the common prefix."""

    name: str
    requests: tuple[tuple[int, int], ...]
    temperature: float = 0.0
    shared: int = 0

    @property
    def tokens(self) -> int:
        """The number of output tokens, or of prompt tokens if each output is a single token."""
        only_prefill = all(output == 1 for _, output in self.requests)
        return sum(prompt if only_prefill else output for prompt, output in self.requests)

    def scaled(self, scale: float) -> Workload:
        """Return the workload with each length multiplied by `scale`, at least one token."""
        requests = tuple(
            (max(round(prompt * scale), 1), max(round(output * scale), 1))
            for prompt, output in self.requests
        )
        shared = min(round(self.shared * scale), *(prompt - 1 for prompt, _ in requests))
        return Workload(
            name=self.name, requests=requests, temperature=self.temperature, shared=max(shared, 0)
        )

    def prompts(self, vocab_size: int, seed: int) -> list[list[int]]:
        """Return the ids of each prompt. Another seed gives ids that no prefix cache holds."""
        rng = np.random.default_rng([seed, len(self.requests)])
        first, last = ordinary_ids(vocab_size)
        shared = rng.integers(first, last, self.shared)
        return [
            np.concatenate((shared, rng.integers(first, last, prompt - self.shared))).tolist()
            for prompt, _ in self.requests
        ]


def ordinary_ids(vocab_size: int) -> tuple[int, int]:
    """Return the first and the last of the ids that prompts are drawn from."""
    return min(1_000, vocab_size // 2), min(100_000, vocab_size - 1)


_MIXED: Final = np.random.default_rng(0).integers(100, 1025, (256, 2)).tolist()
WORKLOADS: Final = {
    work.name: work
    for work in (
        Workload(name="throughput", requests=tuple((a, b) for a, b in _MIXED), temperature=0.6),
        Workload(name="streams", requests=((512, 256),) * 64),
        Workload(name="single", requests=((128, 512),)),
        Workload(name="mixed", requests=((6000, 64), *((200, 200),) * 3) * 8),
        Workload(name="prefill", requests=((4096, 1),) * 32),
        Workload(name="shared", requests=((4160, 32),) * 128, shared=4096),
        Workload(name="long", requests=((32_768, 256),) * 8),
    )
}


def workloads(names: str) -> list[Workload]:
    """Return workloads by name. names: with commas. Raises ConfigError."""
    return [_workload(name) for name in names.split(",")]


def _workload(name: str) -> Workload:
    if batch := re.fullmatch("batch([1-9][0-9]*)", name):
        return Workload(name=name, requests=((128, 256),) * int(batch[1]))
    if name not in WORKLOADS:
        known = ", ".join(WORKLOADS)
        raise ConfigError(f"there is no workload {name!r}; there are: {known}, batchN")
    return WORKLOADS[name]
