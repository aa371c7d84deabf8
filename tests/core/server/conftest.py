"""Fixtures of servers."""

from collections.abc import Iterator

import pytest

from helpers.running_server import POOL, RunningServer
from helpers.server_fixtures import certificate, client, http, pool, server

__all__ = ["certificate", "client", "http", "pool", "pooled", "server"]


@pytest.fixture(scope="session")
def pooled() -> Iterator[RunningServer]:
    """A server in float32 whose pool has fewer tokens than the model's context."""
    with RunningServer(*POOL, "--dtype", "float32") as server:
        assert server.url
        yield server
