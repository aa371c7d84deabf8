"""Waiting for what another thread or process does, and requests that are given up then."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable
from urllib.parse import urlsplit


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def ask_and_leave(url: str, body: object, is_there: Callable[[], object]) -> None:
    """POST `body`, wait until the server has the request, and close the connection."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
    headers = {"content-type": "application/json"}
    connection.request("POST", address.path, json.dumps(body), headers)
    until(is_there)
    connection.close()
