from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from helpers.engine_fixtures import folder, reference
from helpers.loop_thread import LoopThread
from helpers.stub import Script, StubServer

__all__ = ["folder", "reference", "start_stub"]


@pytest.fixture
def start_stub() -> Iterator[Callable[[Script], StubServer]]:
    """Starts a stub beside code that runs its own event loop."""
    with ExitStack() as stack:
        yield lambda script: stack.enter_context(LoopThread(StubServer(script)))
