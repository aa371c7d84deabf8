"""A scripted server for a module, calls in the background.

With $MINISGL_TEST_ROUTER set, clients ask it through a router.
The router has a second server, which is too busy to get a request:

    MINISGL_TEST_ROUTER=1 pytest tests/core/server tests/gateway/doors -k api
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import msgspec
import openai
import pytest

from helpers.background import Background
from helpers.scripted_server import STATE, ScriptedServer


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with ExitStack() as stack:
        server = stack.enter_context(ScriptedServer())
        if os.environ.get("MINISGL_TEST_ROUTER"):
            from helpers.router_thread import RouterThread
            from minisgl_gateway.router.replica_state import ReplicaState

            other = ScriptedServer()
            state = msgspec.json.decode(STATE, type=ReplicaState)
            other.state = msgspec.json.encode(msgspec.structs.replace(state, queued_tokens=10**12))
            stack.enter_context(other)
            router = stack.enter_context(RouterThread([server.url, other.url]))
            server.url = router.url
        yield server


@pytest.fixture(scope="module")
def http(server: ScriptedServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def client(server: ScriptedServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def pool() -> Background:
    return Background()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A self-signed one for 127.0.0.1, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate")
    folder = tmp_path_factory.mktemp("tls")
    certfile, keyfile = str(folder / "cert.pem"), str(folder / "key.pem")
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", keyfile, "-out", certfile),
        ],
        check=True,
        capture_output=True,
    )
    return certfile, keyfile
