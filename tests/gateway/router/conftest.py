"""A router that asks its servers often, over two of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from helpers.routing import Setup
from helpers.scripted_server import STATE
from minisgl_gateway.router import fleet
from minisgl_gateway.watch import replica


@pytest.fixture(autouse=True)
def _often_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "ASK_EVERY_S", 0.1)
    monkeypatch.setattr(replica, "FRESH_S", 0.0)


@pytest.fixture
def two() -> Iterator[Setup]:
    with ExitStack() as stack:
        yield Setup(stack, STATE, STATE)
