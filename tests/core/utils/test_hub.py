"""The hub without a network: one sentence, soon, and files of the cache without asking again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

NOBODY = "http://127.0.0.1:1"  # the port of tcpmux, which nothing uses
ASK = """
import sys, time
time.sleep = lambda seconds: None  # the library waits between its tries
from minisgl.utils.hf import resolve_checkpoint
try:
    print(resolve_checkpoint(sys.argv[1]))
except Exception as error:
    print(type(error).__name__, error)
"""
COMMIT = "0123456789012345678901234567890123456789"


def run(home: Path, endpoint: str, *command: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    env |= {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1"}
    return subprocess.run(
        [sys.executable, *command], env=env, capture_output=True, text=True, timeout=300
    )


class Hub(BaseHTTPRequestHandler):
    """A hub with one GGUF file, of which it sends a part before it closes the connection."""

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("ETag", '"0123"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", "1000")
        self.end_headers()

    def do_GET(self) -> None:
        if "/tree/" in self.path:
            files = [{"type": "file", "path": "m-Q8_0.gguf", "size": 1000, "oid": "0123"}]
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(files).encode())
            return
        self.do_HEAD()
        self.wfile.write(b"GGUF" if "Range" not in self.headers else b"")

    def log_message(self, *_: object) -> None:
        """Log nothing."""


class BusyHub(Hub):
    """It lists its file, and sends nobody any."""

    def do_HEAD(self) -> None:
        self.send_response(429 if "/resolve/" in self.path else 200)
        self.send_header("X-HF-Warning", "unauthenticated; Set HF_TOKEN for higher limits.")
        self.end_headers()


@pytest.fixture(params=[Hub])
def hub(request: pytest.FixtureRequest) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), request.param) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.needs("minisgl_zoo")
@pytest.mark.parametrize("model", ["org/repo:Q4_K_M", "org/repo"])
def test_serve_without_a_network_says_one_sentence(model: str, tmp_path: Path) -> None:
    ran = run(tmp_path, NOBODY, "-m", "minisgl", "serve", model, "--port", "0")
    assert ran.returncode == 1
    [line] = ran.stderr.strip().splitlines()  # no traceback, and no line about another try
    assert "org/repo cannot be downloaded: there is no such folder here" in line
    assert f"{NOBODY} cannot be reached" in line
    assert "set HF_ENDPOINT to a mirror, or pass a local folder or .gguf file" in line


@pytest.mark.needs("minisgl_zoo")
def test_a_download_that_breaks_off_is_a_sentence(tmp_path: Path, hub: str) -> None:
    ran = run(tmp_path, hub, "-c", ASK, "org/repo:Q8_0")
    assert ran.stdout.startswith("ConfigError org/repo cannot be downloaded: "), ran.stderr
    assert "start again to continue the download" in ran.stdout


@pytest.mark.needs("minisgl_zoo")
@pytest.mark.parametrize("hub", [BusyHub], indirect=True)
def test_a_busy_hub_is_told_once(tmp_path: Path, hub: str) -> None:
    """Each request is sent six times. What the hub has to say is passed on."""
    ran = run(tmp_path, hub, "-c", ASK, "org/repo:Q8_0")
    [line] = [line for line in ran.stderr.splitlines() if "429" in line or "etry" in line]
    assert line.endswith("; 5 more tries follow, for half a minute unless the hub asks for more")
    assert "Set HF_TOKEN for higher limits." in ran.stderr.splitlines()
    assert f"{hub} answers 429; check the network, or try later" in ran.stdout


TOLD = """
import logging
from huggingface_hub.utils import logging as theirs
from minisgl.utils.logger import setup_logging
setup_logging("server")
theirs.get_logger("huggingface_hub.utils").warning("by the library")
logging.getLogger("another").warning("by the server")
"""


def test_the_librarys_warnings_are_written_once(tmp_path: Path) -> None:
    """The library has a handler; the root logger, which gets them too, has the server's."""
    by_library, by_server = run(tmp_path, NOBODY, "-c", TOLD).stderr.splitlines()
    assert by_library == "by the library"
    assert by_server.endswith(" W [server] by the server")


@pytest.mark.needs("minisgl_zoo")
def test_a_cached_gguf_needs_no_network(tmp_path: Path) -> None:
    """Another file of the repository may be missing, as after the download of one of many."""
    snapshot = tmp_path / "hub/models--org--repo/snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "m-Q8_0.gguf").write_bytes(b"no GGUF")
    refs = tmp_path / "hub/models--org--repo/refs"
    refs.mkdir()
    (refs / "main").write_text(COMMIT)
    ran = run(tmp_path, NOBODY, "-c", ASK, "org/repo:Q8_0")
    assert ran.stdout.startswith(f"CheckpointError {snapshot / 'm-Q8_0.gguf'}"), ran.stderr
    ran = run(tmp_path, NOBODY, "-c", ASK, "org/repo:Q4_K_M")
    assert "org/repo has no GGUF files Q4_K_M" in ran.stdout
    assert f"This is what the local cache has; {NOBODY} cannot be reached" in ran.stdout
