"""The core without our other four packages: it serves, and refuses the rest by name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

import minisgl
from helpers.running_server import POOL, RunningServer, assert_nothing_left, hangups

SITE = """
import os, sys

sys.path[:] = [each for each in sys.path if not os.path.isdir(os.path.join(each, "minisgl_zoo"))]
sys.meta_path[:] = [each for each in sys.meta_path if "__editable__" not in repr(each)]
"""
"""Forgets our checkout and what pip made editable. Python runs `sitecustomize` at its start."""

CHAT = {"messages": [{"role": "user", "content": "What is 12 + 30?"}]}
PROMPT = {"prompt": "12 + 30", "max_tokens": 2}
SERVED: list[tuple[str, str, dict[str, Any] | None]] = [
    ("POST", "/v1/chat/completions", {**CHAT, "max_tokens": 2}),
    ("POST", "/v1/completions", PROMPT),
    ("POST", "/generate", PROMPT),
    ("GET", "/v1/models", None),
    ("GET", "/openapi.json", None),
    ("GET", "/health", None),
    ("GET", "/ready", None),
    ("GET", "/metrics", None),
]
ABSENT = ["/v1/messages", "/v1/responses", "/api/chat", "/tokenize"]


@pytest.fixture
def alone(tmp_path: Path) -> str:
    """A folder with the core as its only package of ours, for PYTHONPATH."""
    (tmp_path / "minisgl").symlink_to(Path(minisgl.__file__).parent, target_is_directory=True)
    (tmp_path / "sitecustomize.py").write_text(SITE)
    return str(tmp_path)


def test_it_serves_its_own_routes_alone_and_ends_with_its_terminal(alone: str) -> None:
    """One test for one start of a server."""
    with hangups(signal.SIG_DFL):
        started = RunningServer(*POOL, "--device", "cpu", PYTHONPATH=alone)
    with started as server:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            for method, path, body in SERVED:
                answer = client.request(method, path, json=body)
                assert answer.status_code == 200, (path, answer.text)
            assert [client.post(path, json=CHAT).status_code for path in ABSENT] == [404] * 4
            wrong = client.post("/v1/completions", json={"prompt": "a", "temprature": 1}).json()
            assert "temprature is not known here; GET /openapi.json" in wrong["error"]["message"]
        said = server.output["out"]
        assert "/v1/chat/completions' -H" in said
        assert "browser" not in said, "it has no page"
        family = server.family()
        for _ in range(2):  # of the shell and of the kernel
            os.killpg(server.process.pid, signal.SIGHUP)
        assert server.ended() == 0
        assert_nothing_left(server, family)


UNKNOWN = "if it is a flag of minisgl, it needs minisgl_gateway, which is not installed here"


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        (("--api-key", "k"), 1, "--api-key needs minisgl_gateway, which is not installed here"),
        (("--ssl-certfile", "F"), 2, UNKNOWN),
        (("--api-key", "k", "--dry-run"), 1, "--api-key needs minisgl_gateway, which is not inst"),
        (("--api-key-file", "F"), 1, "--api-key-file needs minisgl_gateway, which is not insta"),
        (("--log-requests",), 2, UNKNOWN),
        (("--otlp-endpoint", "http://127.0.0.1:1"), 2, UNKNOWN),
    ],
)
def test_it_starts_no_server_without_what_was_asked_for(
    alone: str, flags: tuple[str, ...], code: int, says: str
) -> None:
    """Above all: a key that nothing checks would leave the server open."""
    done = subprocess.run(
        [sys.executable, "-m", "minisgl", "--port", "0", *POOL, "--device", "cpu", *flags],
        env={**os.environ, "PYTHONPATH": alone},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == code
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert "starting the engine" not in done.stderr
