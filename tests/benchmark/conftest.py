from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from benchmarks.stub import Script
from helpers.stub_thread import StubThread


@pytest.fixture
def start_stub() -> Iterator[Callable[[Script], StubThread]]:
    threads: list[StubThread] = []

    def start(script: Script) -> StubThread:
        threads.append(StubThread(script))
        return threads[-1]

    yield start
    for thread in threads:
        thread.close()
