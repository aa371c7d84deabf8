"""The compiler's cache: shared, damaged, absent."""

from __future__ import annotations

import errno
import logging
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from minisgl.attention import create_attention_backend
from minisgl.kernel import jit, once, registry
from minisgl.kernel.once import JitUnavailable
from minisgl.kernel.ops import Ops
from minisgl.kernel.radix import common_prefix_length, load_common_prefix
from minisgl.kernel.registry import create_ops
from minisgl.utils import arch

# What TVM_FFI_DLL_EXPORT_TYPED_FUNC makes of a function, without the C++ headers, which take
# seconds to compile.
SOURCE = """
#include <tvm/ffi/c_api.h>
extern "C" int __tvm_ffi_answer(void*, const TVMFFIAny*, int32_t, TVMFFIAny* result) {
  *result = {};
  result->type_index = kTVMFFIInt;
  result->v_int64 = 42;
  return 0;
}
"""

load_library = jit.load_library.__wrapped__
"""It looks for the file each time, as processes do."""


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """No test finds a library that another one has loaded."""
    jit.load_library.cache_clear()
    yield
    jit.load_library.cache_clear()


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One small source and an empty cache; the folder of the cache."""
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "answer.cpp").write_text(SOURCE)
    monkeypatch.setattr(jit, "CSRC", sources)
    monkeypatch.setenv("MINISGL_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def libraries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.so"))


def test_builds_once_and_again_when_something_changed(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_library().answer() == 42
    (first,) = libraries(small)
    made = first.stat().st_mtime_ns
    assert load_library().answer() == 42
    assert libraries(small) == [first]
    assert first.stat().st_mtime_ns == made

    source = jit.CSRC / "answer.cpp"
    source.write_text(SOURCE.replace("42", "43"))
    assert load_library().answer() == 43
    assert len(libraries(small)) == 2

    before = jit._library_path(jit.CPU, jit._compiler())
    monkeypatch.setattr(jit, "CFLAGS", (*jit.CFLAGS, "-g"))
    assert jit._library_path(jit.CPU, jit._compiler()) != before


@pytest.mark.parametrize("damage", ["truncated", "changed", "no checksum"])
def test_a_damaged_library_is_built_again(small: Path, damage: str) -> None:
    assert load_library().answer() == 42
    (library,) = libraries(small)
    content = library.read_bytes()
    library.unlink()  # this process has the file mapped: damage a new one
    library.write_bytes(content)
    if damage == "truncated":
        library.write_bytes(content[: len(content) // 2])
    elif damage == "changed":
        library.write_bytes(content[:-100] + bytes(100))
    else:
        library.with_suffix(".sha256").unlink()
    assert load_library().answer() == 42
    assert library.stat().st_size == len(content)


def test_threads_that_start_together_build_once(
    small: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO), ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda _: load_library().answer(), range(3)))
    assert answers == [42, 42, 42]
    assert caplog.text.count("compiling the C++ kernels") == 1
    assert len(libraries(small)) == 1


def test_a_build_begins_while_others_do_something_else(
    small: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    has_begun, may_end = threading.Event(), threading.Event()
    compile_library = jit._compile_library

    def slow(library: jit.Library, flags: Sequence[str], folder: Path) -> Path:
        has_begun.set()
        assert may_end.wait(60)
        return compile_library(library, flags, folder)

    monkeypatch.setattr(jit, "_compile_library", slow)
    with caplog.at_level(logging.INFO), ThreadPoolExecutor(1) as pool:
        building = jit.begin_building()
        assert has_begun.wait(60)
        answer = pool.submit(lambda: load_library().answer())
        time.sleep(0.2)
        assert not answer.done()
        may_end.set()
        assert answer.result(60) == 42
        building.join(60)
    assert caplog.text.count("compiling the C++ kernels") == 1


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_a_build_ends_with_the_process_that_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real").mkdir()
    real = tmp_path / "real" / "ninja"
    real.write_text("#!/bin/sh\necho $$ $1\nexec sleep 60\n")
    real.chmod(0o700)
    monkeypatch.setenv("PATH", f"{real.parent}:{os.environ['PATH']}")
    code = "import subprocess; subprocess.run(['ninja', '-v'])"
    (tmp_path / "build.ninja").touch()
    with jit._ninja_on_path(tmp_path, tmp_path):
        killed = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=tmp_path
        )
    assert killed.stdout
    with killed, killed.stdout as said:
        pid, flag = said.readline().split()
        assert flag == "-v"
        killed.kill()
        assert said.read() == "", "its end closes the pipe"
        killed.wait(10)
    with suppress(ProcessLookupError):
        os.kill(int(pid), signal.SIGKILL)


def test_builds_of_two_threads_do_not_take_ninja_from_each_other(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is not on the PATH, as in an environment that is not activated."""
    from tvm_ffi import cpp

    without = str(small)
    running: list[str] = []

    def build(name: str, *, build_directory: str, **_: object) -> str:
        running.append(name)
        time.sleep(0.2)
        assert running == [name]
        assert os.environ["PATH"] != without
        running.clear()
        built = Path(build_directory) / name
        built.touch()
        return str(built)

    compiler = jit._compiler()
    monkeypatch.setattr(cpp, "build", build)
    monkeypatch.setattr(jit, "_compiler", lambda: compiler)
    monkeypatch.setenv("PATH", without)
    other = jit.Library("other", "", "something else")
    building = jit.begin_building()
    path = jit._build_library(other)
    building.join(60)
    assert path.exists()
    assert len(libraries(small)) == 2
    assert os.environ["PATH"] == without


def test_paths_with_spaces(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the sources, of the cache, and of the environment with tvm-ffi."""
    from tvm_ffi import cpp
    from tvm_ffi.cpp import extension

    home = small.parent / "my home"
    shutil.copytree(jit.CSRC, home / "csrc")
    (home / "ffi").symlink_to(Path(cpp.__file__).parents[1])
    monkeypatch.setattr(jit, "CSRC", home / "csrc")
    monkeypatch.setattr(cpp, "__file__", str(home / "ffi/cpp/__init__.py"))
    for name in ("find_include_path", "find_dlpack_include_path", "find_libtvm_ffi"):
        path = Path(getattr(extension, name)()).relative_to((home / "ffi").resolve())
        monkeypatch.setattr(extension, name, lambda path=path: str(home / "ffi" / path))
    monkeypatch.setenv("MINISGL_CACHE_DIR", str(home / "cache"))
    assert load_library().answer() == 42
    assert len(libraries(home / "cache")) == 1


def test_a_build_that_fails_in_the_background_is_raised_at_the_load(small: Path) -> None:
    (jit.CSRC / "answer.cpp").write_text("int broken( { }\n")
    jit.begin_building().join(60)
    with pytest.raises(JitUnavailable, match="error: expected"):
        load_library()


def test_what_a_killed_build_left_is_removed(small: Path) -> None:
    path = jit._library_path(jit.CPU, jit._compiler())
    left = small / f"{path.stem}-abc"
    other = small / "minisgl_cpu-of-another"
    for folder in (left, other):
        folder.mkdir(parents=True)
    (left / "half.o").touch()
    assert load_library().answer() == 42
    assert not left.exists()
    assert other.exists()


def test_on_a_gpu_the_hosts_kernels_are_built_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    monkeypatch.setattr(registry, "begin_building", lambda: begun.append("the host's"))
    no_triton = SimpleNamespace(CudaOps=Ops, create_ops=Ops)
    for name in ("minisgl.kernel.cuda", "minisgl_kernels.ops"):
        monkeypatch.setitem(sys.modules, name, no_triton)
    create_ops(torch.device("cuda"))
    assert begun == ["the host's"]


def test_a_source_that_does_not_compile_is_one_line(
    small: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (jit.CSRC / "answer.cpp").write_text("int broken( { }\n")
    with caplog.at_level(logging.WARNING):
        assert type(create_ops(torch.device("cpu"))) is Ops
    (record,) = caplog.records
    message = record.getMessage()
    assert "\n" not in message
    assert "error: expected" in message
    assert libraries(small) == []


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError(
            "FAILED: main.o\nld: final link failed: No space left on device\nld: error: 1"
        ),
    ],
)
def test_a_build_that_fails_is_tried_once(
    small: Path, error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By the ops, the attention and the prefix tree of a start, which all say why."""

    def fail(*_: object) -> Path:
        nonlocal num_tries
        num_tries += 1
        raise error

    num_tries = 0
    monkeypatch.setattr(jit, "_compile_library", fail)
    with caplog.at_level(logging.INFO):
        ops = create_ops(torch.device("cpu"))
        assert create_attention_backend("auto", ops).name == "torch"
        assert load_common_prefix() is common_prefix_length
    assert num_tries == 1
    reasons = [m for m in caplog.messages if "No space left on device" in m]
    assert len(reasons) == 3
    assert all(f"kept in {small}; MINISGL_CACHE_DIR names another" in m for m in reasons)


def test_kernels_that_came_with_the_package_need_no_compiler(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best that the processor can run is loaded; with changed sources it is none of them."""
    monkeypatch.setattr(jit, "PREBUILT", tmp_path / "prebuilt")
    monkeypatch.delenv("MINISGL_CPU_ISA", raising=False)
    machine = platform.machine()
    able = arch.InstructionSet(flags=("-O1",), needs=frozenset())
    unable = arch.InstructionSet(flags=("-O2",), needs=frozenset({"no such feature"}))
    sets = {"wide": unable, "middle": able, "narrow": able}
    monkeypatch.setattr(arch, "SETS", {machine: sets})
    files = jit.build_ahead()
    assert [name in file.name for name, file in zip(sets, files, strict=True)] == [True] * 3
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert load_library().answer() == 42
    assert jit._build_library(jit.CPU) == files[1]
    assert not small.exists()
    (jit.CSRC / "answer.cpp").write_text(SOURCE + "// changed")
    with pytest.raises(JitUnavailable, match="no C\\+\\+ compiler"):
        load_library()


def test_processes_that_wait_for_a_build_that_fails_do_not_try_it(tmp_path: Path) -> None:
    """Two threads with memories of their own stand for two processes."""
    entered, tries = threading.Event(), []

    def fail(folder: Path) -> Path:
        tries.append(folder)
        entered.set()
        time.sleep(0.2)  # the other waits for the lock meanwhile
        raise RuntimeError("error: no")

    def attempt() -> str:
        with pytest.raises(JitUnavailable) as raised:
            once.build_once(tmp_path / "x.so", "x", fail)
        return str(raised.value)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(attempt)
        assert entered.wait(30)
        second = pool.submit(attempt)
        assert first.result() == second.result() == "compiling failed: error: no"
    assert len(tries) == 1


def test_the_log_counts_the_files_that_are_compiled(
    small: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(2):
        (jit.CSRC / f"more{number}.cpp").write_text("")
    monkeypatch.setattr(jit, "PROGRESS_S", 0.01)
    with caplog.at_level(logging.INFO):
        assert load_library().answer() == 42
    counts = [m for m in caplog.messages if " of 3 files in " in m]
    assert counts
    assert counts == sorted(counts)
