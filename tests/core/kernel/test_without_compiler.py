"""Machines without a compiler, and the command that builds the kernels."""

from __future__ import annotations

import logging
import runpy
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from minisgl.attention import create_attention_backend
from minisgl.errors import ConfigError
from minisgl.kernel import build, jit
from minisgl.kernel.ops import Ops
from minisgl.kernel.radix import common_prefix_length, load_common_prefix
from minisgl.kernel.registry import create_ops


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("MINISGL_DISABLE_JIT", "1", "MINISGL_DISABLE_JIT=1"),
        ("CXX", "no-such-compiler", "no C++ compiler: no 'no-such-compiler' on the PATH"),
    ],
)
def test_without_a_compiler_everything_is_plain_torch(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    variable: str,
    value: str,
    reason: str,
) -> None:
    monkeypatch.setenv(variable, value)
    jit.load_library.cache_clear()  # tests before this one have loaded it
    with caplog.at_level(logging.INFO):
        ops = create_ops(torch.device("cpu"))
        assert type(ops) is Ops
        assert create_attention_backend("auto", ops).name == "torch"
        assert load_common_prefix() is common_prefix_length
    assert [reason in record.getMessage() for record in caplog.records] == [True] * 3
    with pytest.raises(ConfigError, match="attention backend 'cpu' needs its C"):
        create_attention_backend("cpu", ops)


def test_an_unknown_attention_backend_names_those_that_exist() -> None:
    with pytest.raises(ConfigError, match="'flash'; choose one of auto, cpu, torch"):
        create_attention_backend("flash", Ops())


def test_build_command_fails_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(sys, "argv", ["build"])
    jit.load_library.cache_clear()
    monkeypatch.delitem(sys.modules, build.__name__)
    with pytest.raises(SystemExit) as exit_info:
        runpy.run_module(build.__name__, run_name="__main__")
    assert exit_info.value.code == 1
    assert "install g++" in capsys.readouterr().err


def test_ctrl_c_while_it_builds_is_no_traceback() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as exit_info:
        build._build("kernels", interrupted, "")
    assert exit_info.value.code == 130


@pytest.mark.parametrize(
    ("flag", "code", "says"),
    [("--help", 0, "usage: python -m minisgl.kernel.build"), ("--all", 2, "arguments: --all")],
)
def test_build_command_builds_nothing_when_asked_otherwise(
    flag: str,
    code: int,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("MINISGL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["build", flag])
    with pytest.raises(SystemExit) as exit_info:
        build.main()
    captured = capsys.readouterr()
    assert (exit_info.value.code, says in captured.out + captured.err) == (code, True)
    assert list(tmp_path.iterdir()) == []


def test_radix_imports_no_torch() -> None:
    code = "import sys, minisgl.kernel.radix; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=150).returncode == 0


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_one_openmp_runtime() -> None:
    """Two would mean two thread pools that fight for the cores. In a process of its own, since a
    package that another test imports may bring a runtime."""
    code = (
        "import torch; from minisgl.kernel.registry import create_ops; "
        "create_ops(torch.device('cpu')); print(open('/proc/self/maps').read())"
    )
    maps = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert maps.returncode == 0, maps.stderr
    lines = maps.stdout.splitlines()
    runtimes = {line.split()[-1] for line in lines if "libgomp" in line or "libomp" in line}
    assert len(runtimes) == 1, runtimes


def test_kernels_let_other_threads_run() -> None:
    ops = create_ops(torch.device("cpu"))
    x, weight = torch.ones(2000, 4096), torch.ones(4096)
    turns, done = 0, threading.Event()

    def spin() -> None:
        nonlocal turns
        while not done.is_set():
            turns += 1
            time.sleep(0)

    previous = sys.getswitchinterval()
    sys.setswitchinterval(10)  # a thread gets the interpreter only when another one releases it
    thread = threading.Thread(target=spin)
    try:
        thread.start()
        for _ in range(5):
            ops.rms_norm(x, weight, 1e-6)
        assert turns > 0
    finally:
        sys.setswitchinterval(previous)
        done.set()
        thread.join()
