"""The fixed workloads of the tables: how long the requests are that arrive all at once.

throughput   256, 100 to 1,024 tokens in and out
streams      64, 512 in, 256 out
single       one, 128 in, 512 out
mixed        32, every fourth 6,000 in and 64 out, the others 200 in and 200 out
prefill      32, 4,096 in, 1 out
batchN       N, 128 in, 256 out
"""

from __future__ import annotations

import re

import numpy as np

from minisgl.errors import ConfigError


def lengths_of(workload: str) -> list[tuple[int, int]]:
    """(prompt, output) tokens of each request. Raises ConfigError."""
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
