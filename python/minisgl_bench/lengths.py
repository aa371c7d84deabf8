"""The workloads of the tables: the lengths of requests that all arrive at once.

throughput   256 requests, 100 to 1,024 tokens in and out
streams      64, 512 in, 256 out
single       one, 128 in, 512 out
mixed        32, every fourth 6,000 in and 64 out, the others 200 in and 200 out
prefill      32, 4,096 in, 1 out
shared       128, 4,160 in, 32 out; the first 4,096 tokens are common (`benchmark offline`)
long         8, 32,768 in, 256 out (`benchmark offline`)
batchN       N, 128 in, 256 out
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from minisgl.errors import ConfigError


def lengths_of(workload: str) -> list[tuple[int, int]]:
    """Return the (prompt, output) tokens of each request. Raises ConfigError."""
    if workload == "throughput":
        mixed = np.random.default_rng(0).integers(100, 1025, (256, 2))
        return [(int(prompt), int(output)) for prompt, output in mixed]
    if workload == "streams":
        return [(512, 256)] * 64
    if workload == "single":
        return [(128, 512)]
    if workload == "mixed":
        return [(200, 200) if i % 4 else (6000, 64) for i in range(32)]
    if workload == "prefill":
        return [(4096, 1)] * 32
    if batch := re.fullmatch("batch([1-9][0-9]*)", workload):
        return [(128, 256)] * int(batch[1])
    raise ConfigError(
        f"there is no workload {workload!r}; there are: throughput, streams, single, mixed, "
        "prefill, batchN"
    )


def temperature_of(workload: str) -> float:
    """Return the temperature of its requests: throughput samples, the others are greedy."""
    return 0.6 if workload == "throughput" else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """requests: (prompt, output) lengths. shared: the length of the common prefix."""

    name: str
    requests: tuple[tuple[int, int], ...]
    temperature: float
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


def offline_workloads(names: Sequence[str]) -> list[Workload]:
    """Return workloads by name, as `benchmark offline` has them. Raises ConfigError."""
    known = {
        name: Workload(
            name=name,
            requests=tuple(lengths_of(name)),
            temperature=temperature_of(name),
        )
        for name in ("throughput", "streams", "single", "mixed", "prefill")
    }
    known["shared"] = Workload(
        name="shared", requests=((4160, 32),) * 128, temperature=0.0, shared=4096
    )
    known["long"] = Workload(name="long", requests=((32_768, 256),) * 8, temperature=0.0)
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"there is no workload {unknown[0]!r}; there are: {', '.join(known)}")
    return [known[name] for name in names]
