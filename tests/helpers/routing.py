"""A router over servers with scripted pipelines, and requests to it."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import httpx
import msgspec

from helpers.router_thread import RouterThread
from helpers.scripted_server import MODEL, STATE, ScriptedServer, text_of
from helpers.waiting import until
from minisgl_gateway.router.replica_state import ReplicaState


def state_with(**fields: Any) -> bytes:
    state = msgspec.json.decode(STATE, type=ReplicaState)
    return msgspec.json.encode(msgspec.structs.replace(state, **fields))


class Setup:
    """A router over two servers. Mutable."""

    def __init__(self, stack: ExitStack, *states: bytes) -> None:
        self.servers = []
        for state in states:
            server = ScriptedServer()
            server.state = state
            self.servers.append(stack.enter_context(server))
        self.router = stack.enter_context(RouterThread([each.url for each in self.servers]))
        self.url = self.router.url

    def set_state(self, index: int, **fields: int) -> None:
        """Change a server's state, and wait until the router has it."""
        self.servers[index].state = state_with(**fields)
        expected = msgspec.json.decode(state_with(**fields), type=ReplicaState)
        view = self.router.fleet.replicas[index].view

        def is_there() -> bool:
            names = ("queued_tokens", "num_running")
            return all(getattr(view.state, name) == getattr(expected, name) for name in names)

        until(is_there)

    def name(self, index: int) -> str:
        return self.router.fleet.replicas[index].name

    def served_by(self, text: str) -> int:
        """Return the index of the server that has received the prompt."""
        found = [
            index
            for index, server in enumerate(self.servers)
            if any(text_of(message) == text for message in server.received)
        ]
        assert len(found) == 1, found
        return found[0]


def complete(url: str, prompt: str, **more: object) -> httpx.Response:
    body = {"model": MODEL, "prompt": prompt, **more}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60)
