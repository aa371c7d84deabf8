"""Compiles C++ when it is first used; all processes use one cache.

tvm-ffi builds and loads; this module decides what to build, and `once` whether it must be built.
The name of a built file has a hash of everything that it depends on (sources, flags, compiler,
processor), so a stale file is never loaded.

`python -m minisgl.kernel.build --ahead` compiles the C++ for common instruction sets into the
folder `PREBUILT`. A wheel that is built then contains them, so an installation needs no compiler:
the first file in the order of `instruction_sets` that the processor can run is loaded.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from minisgl import env
from minisgl.kernel.once import JitUnavailable, build_once
from minisgl.utils.arch import cpu_flags, cpu_limit, instruction_sets
from minisgl.utils.logger import get_logger

logger = get_logger(__name__)

CSRC = Path(__file__).parent / "csrc"
PREBUILT = Path(__file__).parent / "prebuilt"
# fp-contract: a * b + c in one rounding. no-math-errno, no-trapping-math: we read neither errno nor
# traps, and GCC vectorises comparisons only with them. Infinities and NaN keep their meaning.
CFLAGS = (
    *("-std=c++17", "-O3", "-pthread", "-ffp-contract=fast"),
    *("-fno-math-errno", "-fno-trapping-math", "-Wno-psabi", "-Wfatal-errors"),
)
LDFLAGS = ("-pthread",)
PROGRESS_S = 10.0  # a longer silence looks like a hang

_BUILDING = threading.Lock()


@dataclass(frozen=True, slots=True)
class Library:
    """The .cpp files of one folder under `csrc/`."""

    name: str
    folder: str
    what: str  # for the log


CPU = Library("minisgl_cpu", "", "the C++ kernels")
CUDA = Library("minisgl_cuda", "cuda", "the calls of NCCL and the CUDA driver")


@cache  # to find the file takes 10 ms: its sources and its content are hashed
def load_library(library: Library = CPU) -> Any:
    """Return the compiled library, a tvm-ffi module whose attributes are functions.

    A built library loads in milliseconds. Raises JitUnavailable.
    """
    path = _build_library(library)
    import tvm_ffi

    try:
        return tvm_ffi.load_module(str(path))
    except (RuntimeError, OSError) as error:
        raise JitUnavailable(f"{path} does not load: {error}") from error


def begin_building() -> threading.Thread:
    """Build the C++ kernels in a thread, if they are not built yet."""
    return build_in_thread(lambda: _build_library(CPU))


def build_in_thread(build: Callable[[], object]) -> threading.Thread:
    """Call `build`, which uses `build_once`, in a thread. Other calls of it wait for the thread
    and raise its error."""

    def build_quietly() -> None:
        with suppress(JitUnavailable):
            build()

    thread = threading.Thread(target=build_quietly, name="build", daemon=True)
    thread.start()
    return thread


def refuse_if_disabled() -> None:
    """Raise JitUnavailable if the operator wants nothing compiled."""
    if env.jit_disabled():
        raise JitUnavailable("MINISGL_DISABLE_JIT=1")


def _build_library(library: Library) -> Path:
    refuse_if_disabled()
    if library == CPU and (shipped := _shipped(_sources(CPU))):
        return shipped
    path = _library_path(library, _compiler())
    what = f"{library.what} (first start only)"
    build_once(path, what, partial(_compile_library, library, own_flags()))
    return path


def _ahead_path(name: str, sources: str) -> Path:
    """Return the file of the kernels for an instruction set. sources: the hash of the sources."""
    return PREBUILT / f"minisgl_cpu-{platform.machine()}-{name}-{sources}.so"


def _shipped(sources: str) -> Path | None:
    """Return the best file that this processor can run, or None. sources: see `_ahead_path`."""
    if not PREBUILT.is_dir():
        return None
    for name, each in instruction_sets().items():
        if each.needs <= cpu_flags() and (found := _ahead_path(name, sources)).is_file():
            return found
    return None


def build_ahead() -> list[Path]:
    """Compile the C++ kernels for each instruction set into `PREBUILT`, for a wheel. Returns the
    files. Raises JitUnavailable."""
    refuse_if_disabled()
    _compiler()
    made = []
    for name, each in instruction_sets().items():
        path = _ahead_path(name, _sources(CPU))
        what = f"the C++ kernels for {name}"
        build_once(path, what, partial(_compile_library, CPU, each.flags))
        made.append(path)
    return made


def _compiler() -> str:
    name = os.environ.get("CXX", "c++")
    found = shutil.which(name)
    if found is None:
        raise JitUnavailable(f"no C++ compiler: no {name!r} on the PATH (install g++, or set CXX)")
    return found


def _library_path(library: Library, compiler: str) -> Path:
    # The file's time stands for the compiler's version, because asking for that costs a process.
    binary = Path(compiler).resolve()
    parts = (_sources(library), str(binary), binary.stat().st_mtime_ns, own_flags(), _processor())
    key = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
    return env.cache_dir() / f"{library.name}-{key}.so"


def _sources(library: Library) -> str:
    """Return a hash of a library's sources, flags and tvm-ffi, without the compiler and the
    processor."""
    import tvm_ffi

    key = hashlib.sha256(repr((CFLAGS, LDFLAGS, tvm_ffi.__version__)).encode())
    for source in sorted((CSRC / library.folder).iterdir()):
        if source.is_file():
            key.update(source.name.encode() + b"\0" + source.read_bytes())
    return key.hexdigest()[:16]


def _compile_library(library: Library, flags: Sequence[str], folder: Path) -> Path:
    from tvm_ffi import cpp

    # tvm-ffi writes a path's spaces as they are: in the name of a file ninja wants "$ ".
    found = sorted((CSRC / library.folder).glob("*.cpp"))
    sources = [str(source).replace(" ", "$ ") for source in found]
    ffi = Path(cpp.__file__).parents[1]
    # One thread at a time, because all threads have one PATH.
    with _BUILDING, _ninja_on_path(folder, ffi), _progress(folder, len(sources)):
        return Path(
            cpp.build(
                library.name,
                sources=sources,
                extra_cflags=[*CFLAGS, *flags],
                extra_ldflags=LDFLAGS,
                build_directory=str(folder),
            )
        )


@contextmanager
def _progress(folder: Path, num_files: int) -> Iterator[None]:
    """Log how many files are compiled, every PROGRESS_S seconds."""
    is_done = threading.Event()

    def report() -> None:
        began = time.monotonic()
        while not is_done.wait(PROGRESS_S):
            num_compiled = len(list(folder.glob("*.o")))
            seconds = time.monotonic() - began
            logger.info("compiled %d of %d files in %.0f s", num_compiled, num_files, seconds)

    reporter = threading.Thread(target=report, name="compile-progress", daemon=True)
    reporter.start()
    try:
        yield
    finally:
        is_done.set()
        reporter.join()


def own_flags() -> Sequence[str]:
    """Return the compiler's flags for this CPU: all that it has, or the set of MINISGL_CPU_ISA."""
    limit = cpu_limit()
    return limit.flags if limit else ("-march=native",)


def _processor() -> str:
    """Return the processor's features, on which -march=native depends."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return " ".join(os.uname())
    names = ("model name", "flags", "CPU implementer", "CPU part", "Features")
    return "\n".join(sorted({line for line in lines if line.startswith(names)}))


# It becomes ninja, which on Linux ends with the process that has started it (PR_SET_PDEATHSIG): a
# worker that is killed leaves no compilers behind. Before, spaces in tvm-ffi's folder are escaped.
NINJA = r"""import ctypes, os, sys; getattr(ctypes.CDLL(None), "prctl", max)(1, 15)
text = open("build.ninja").read().replace(sys.argv[1], sys.argv[1].replace(" ", r"\ "))
open("build.ninja", "w").write(text); os.execv(sys.argv[2], sys.argv[2:])"""


@contextmanager
def _ninja_on_path(folder: Path, ffi: Path) -> Iterator[None]:
    """Put a script in `folder`, which tvm-ffi runs as ninja, on the PATH. The real ninja may be in
    an environment that is not activated. ffi: tvm-ffi's folder."""
    if not (real := shutil.which("ninja")):
        import ninja

        real = f"{ninja.BIN_DIR}/ninja"
    words = shlex.join([sys.executable, "-ISc", NINJA, str(ffi), real])
    (folder / "ninja").write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    (folder / "ninja").chmod(0o700)
    before = os.environ.get("PATH", os.defpath)
    os.environ["PATH"] = f"{folder}{os.pathsep}{before}"
    try:
        yield
    finally:
        os.environ["PATH"] = before
