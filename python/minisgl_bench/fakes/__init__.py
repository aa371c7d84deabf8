"""Fakes of the device and the sockets, to test scheduling in milliseconds.

What it is for: tests and overhead benchmarks. What it does not know: torch. The server never
imports it. Read next: `tests/core/scheduler`.
"""

from minisgl_bench.fakes.fake_executor import (
    FakeExecutor,
    InstantExecutor,
    fake_logprob,
    fake_next_id,
)
from minisgl_bench.fakes.queues import ListInbox, ListOutbox

__all__ = [
    "FakeExecutor",
    "InstantExecutor",
    "ListInbox",
    "ListOutbox",
    "fake_logprob",
    "fake_next_id",
]
