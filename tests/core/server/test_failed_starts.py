"""What a server says that cannot start, and that it leaves no process."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from helpers.running_server import POOL, assert_nothing_left
from helpers.shells import here
from minisgl.builtin import model_path

DRY = ("--dry-run",)


def test_a_port_in_use_is_reported_before_the_model_is_loaded(launch: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        server = launch("--port", port)
        assert server.ended() == 1
    assert f"port {port} is in use" in server.output["err"]
    assert "--port" in server.output["err"]
    assert "starting the engine" not in server.output["err"]


def test_a_missing_model(launch: Any) -> None:
    server = launch("--model", "/no/such/model")
    assert server.ended() == 1
    assert "there is no folder /no/such/model" in server.output["err"]
    assert_nothing_left(server, [])


@pytest.mark.needs("minisgl_gateway")
@pytest.mark.parametrize(
    ("flags", "generation", "ranks", "says"),
    [
        (
            POOL,
            {},
            "--tp 5",
            "--tp 5 needs a query head for each rank, and the model has 4; use at most",
        ),
        (
            DRY,
            {},
            "--tp 2 --ep",
            "--ep splits experts over ranks, and config.json names none; leav",
        ),
        (
            DRY,
            {"temperature": 7},
            "",
            "generation_config.json: temperature must be between 0 and 2",
        ),
        (
            ("--device", "cpu"),
            {},
            "--max-seq-len 1000000",
            "--max-seq-len 1000000 exceeds the ",
        ),
        (
            POOL,
            {"top_k": "all"},
            "--tp 2",
            "generation_config.json: top_k must be a number, got 'all'",
        ),
    ],
)
def test_errors_of_small_files_are_reported_before_any_process_starts(
    sockets: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    generation: dict[str, Any],
    ranks: str,
    says: str,
    flags: tuple[str, ...],
) -> None:
    """In this process: an interpreter for each would take nearly all of the time."""
    monkeypatch.setattr("tempfile.tempdir", str(sockets))
    before = psutil.Process().children()
    folder = tmp_path_factory.mktemp("m") / "model"
    shutil.copytree(model_path(), folder)
    (folder / "generation_config.json").write_text(json.dumps(generation))
    code, out, err = here("--port", "0", "--model", str(folder), *ranks.split(), *flags)
    assert (code, out) == (1, "")
    assert says in err
    assert "starting" not in err
    assert "could not start" not in err
    assert "Traceback" not in err
    assert list(sockets.iterdir()) == []
    assert set(psutil.Process().children()) <= set(before)


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("serve", "--host", "a..b"), 1, "; give one as 0.0.0.0 or ::1"),
        (("serve", "--lora", f"a={'x' * 300}"), 1, "x" * 300),
        (("chat", "~no-such-user/model"), 1, "there is no folder ~no-such-user/model"),
        (("chat", "x" * 300), 1, "x" * 300),
    ],
    ids=["host", "adapter", "no user", "long"],
)
@pytest.mark.needs("minisgl_gateway")
def test_names_that_the_system_refuses_cause_no_traceback(
    sockets: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    code: int,
    says: str,
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(sockets))
    monkeypatch.setattr("minisgl.utils.hub.why_offline", lambda: "the hub is not asked")
    ended, out, err = here(*words, "--port", "0")
    assert (ended, out) == (code, "")
    assert says in err


def test_a_closed_stdout_causes_no_traceback(sockets: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    server = subprocess.Popen(
        [sys.executable, "-m", "minisgl", "--port", "0", *POOL],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(sockets)},
    )
    os.close(writer)
    assert server.stderr
    log = ""
    while "the engine is ready" not in log:
        line = server.stderr.readline()
        assert line, log
        log += line
    with pytest.raises(subprocess.TimeoutExpired):
        server.wait(0.5)  # it serves
    server.terminate()
    _, rest = server.communicate(timeout=60)
    assert (server.returncode, "Traceback" in log + rest) == (0, False), log + rest


def test_a_wrong_environment_variable(launch: Any) -> None:
    server = launch(MINISGL_DISABLE_JIT="yes", MINISGL_LOG_LEVEL="")
    assert server.ended(150) == 1
    assert "MINISGL_DISABLE_JIT must be 0 or 1, got 'yes'" in server.output["err"]
    assert "Serving" not in server.output["out"]
    assert_nothing_left(server, [])


@pytest.mark.needs("minisgl_gateway")
def test_a_broken_checkpoint(launch: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("broken")
    (folder / "config.json").write_text('{"architectures": ["Nobody"], "model_type": "nobody"}')
    server = launch("--model", str(folder))
    assert server.ended(150) == 1
    assert f"E [server] {folder} has neither model.safetensors nor" in server.output["err"]
    assert "starting the engine" not in server.output["err"]
    assert_nothing_left(server, [])


@pytest.mark.needs("minisgl_gateway")
def test_a_broken_tokenizer(launch: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("m") / "model"
    shutil.copytree(model_path(), folder)
    (folder / "tokenizer.json").write_text("{")
    server = launch("--model", str(folder), *DRY)
    assert server.ended(150) == 1
    told = rf"the \S*tokenizer\S* could not start: {folder}/tokenizer.json does not load as a t"
    assert re.search(told, server.output["err"])
    assert server.output["out"] == ""
    assert_nothing_left(server, [])


@pytest.mark.needs("minisgl_gateway")
def test_weights_that_are_cut_off(launch: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("m") / "model"
    shutil.copytree(model_path(), folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    server = launch("--model", str(folder), *POOL)
    assert server.ended(150) == 1
    assert f"E [server] {weights} is damaged or incomplete" in server.output["err"]
    assert "starting the engine" not in server.output["err"]
    assert server.output["out"] == ""
    assert_nothing_left(server, [])


@pytest.mark.needs("minisgl_gateway")
def test_a_dry_run_needs_no_weights(launch: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("m") / "model"
    shutil.copytree(model_path(), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    server = launch("--model", str(folder), "--dry-run")
    assert server.ended(150) == 0
    assert "has no weights yet; a start needs them" in server.output["err"]
    assert "KV pool" in server.output["out"]
    (folder / "pytorch_model.bin").touch()  # there are weights, which a start would refuse
    server = launch("--model", str(folder), "--dry-run")
    assert server.ended(150) == 1
    assert "its weights are PyTorch pickles" in server.output["err"]


SLOW_IMPORT = """
import sys, time
from pathlib import Path

class Slow:
    def find_spec(self, name, path=None, target=None):
        while name == {module!r} and not Path({go!r}).exists():
            time.sleep(0.01)

sys.meta_path.insert(0, Slow())
"""


@pytest.mark.parametrize(
    ("module", "index", "name"),
    [("fastapi", 0, "engine"), ("fastapi", 1, "tokenizer-0"), ("torch", 1, "tokenizer-0")],
)
def test_a_worker_that_is_killed_during_the_start_is_noticed_at_once(
    launch: Any, tmp_path: Path, module: str, index: int, name: str
) -> None:
    """While this process imports FastAPI, or a worker that is ready while the engine loads."""
    go = tmp_path / "go"
    (tmp_path / "sitecustomize.py").write_text(SLOW_IMPORT.format(module=module, go=str(go)))
    server = launch(PYTHONPATH=os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    server.wait_for("(starting the engine)", "err")
    if module == "torch":
        server.wait_for(f"(the {name} is ready)", "err")
    while len(workers := server.workers()) < 3:
        time.sleep(0.01)
    workers[index].kill()
    server.wait_for(f"(the {name} process was killed by signal 9)", "err", 30)
    go.touch()
    assert server.ended() == 1
    assert_nothing_left(server, workers)
