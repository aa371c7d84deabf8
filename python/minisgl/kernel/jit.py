"""Compiles C++ and CUDA on first use and loads it: tvm-ffi with a cache that is safe to share.

tvm-ffi builds and loads; this module decides when to build. A built file is named by a hash of
everything that it depends on (sources, flags, compiler, processor or GPU), so a changed source or
another machine never loads a stale file. It appears under its name in one rename, complete, next to
its checksum, so a damaged file is noticed before the loader maps it, and built again. Processes
that start together wait for one build.

The machine's compiler compiles C++. NVRTC, which comes with a CUDA build of torch, compiles CUDA,
so no CUDA toolkit is needed. Importing tvm_ffi imports torch, which loads torch's OpenMP runtime
first; ours shares it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minisgl import env
from minisgl.kernel.library import JitUnavailable, refuse_if_disabled
from minisgl.utils.logger import get_logger

logger = get_logger(__name__)

CSRC = Path(__file__).parent / "csrc"
# fp-contract: a * b + c in one rounding. no-math-errno, no-trapping-math: we read neither errno nor
# traps, and GCC vectorises comparisons only with them. Infinities and NaN keep their meaning.
CFLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fopenmp", "-ffp-contract=fast"),
    *("-fno-math-errno", "-fno-trapping-math", "-Wno-psabi", "-Wfatal-errors"),
)
LDFLAGS = ("-fopenmp",)

_BUILDING = threading.Lock()


@dataclass(frozen=True, slots=True)
class Library:
    """The .cpp files of one folder under `csrc/`."""

    name: str
    folder: str
    what: str  # for the log


CPU = Library("minisgl_cpu", "", "the C++ kernels")
CUDA = Library("minisgl_cuda", "cuda", "the calls of NCCL and the CUDA driver")


def load_library(library: Library = CPU) -> Any:
    """The compiled library, as a tvm-ffi module whose attributes are functions.

    A cached library loads in milliseconds. Raises JitUnavailable.
    """
    path = _build_library(library)
    import tvm_ffi

    try:
        return tvm_ffi.load_module(str(path))
    except (RuntimeError, OSError) as error:
        raise JitUnavailable(f"{path} does not load: {error}") from error


def begin_building(library: Library = CPU) -> threading.Thread:
    """Build the library in a thread, if it is not built yet."""
    return build_in_thread(lambda: _build_library(library))


def build_in_thread(build: Callable[[], object]) -> threading.Thread:
    """Build something in a thread, if it is not built yet. A caller that calls `build` meanwhile
    waits for it, and gets its error."""

    def build_quietly() -> None:
        with suppress(JitUnavailable):
            build()

    thread = threading.Thread(target=build_quietly, name="build", daemon=True)
    thread.start()
    return thread


def load_cubin(name: str, arch: str, defines: Iterable[str] = (), before: str = "") -> bytes:
    """Compile `csrc/cuda/NAME.cu` for GPUs of `arch` ("sm_90"). Returns a cubin.

    defines: macros as NAME=VALUE. before: text in front of the source, which includes no files, as
    there may be no CUDA headers. Raises JitUnavailable.
    """
    refuse_if_disabled()
    try:
        from cuda.bindings import nvrtc

        version = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        raise JitUnavailable(
            f"no NVRTC, which CUDA builds of torch bring along: {_gist(str(error))}"
        ) from error
    from tvm_ffi.cpp.nvrtc import nvrtc_compile

    source = before + (CSRC / "cuda" / f"{name}.cu").read_text()
    options = ["-std=c++17", *(f"-D{define}" for define in defines)]

    def compile_cubin(folder: Path) -> Path:
        cubin = folder / name
        cubin.write_bytes(nvrtc_compile(source, name=f"{name}.cu", arch=arch, extra_opts=options))
        return cubin

    key = hashlib.sha256(repr((source, options, version)).encode()).hexdigest()[:16]
    path = env.cache_dir() / f"{name}-{arch}-{key}.cubin"
    _build_once(path, f"{name}.cu for {arch}", compile_cubin, logging.DEBUG)
    return path.read_bytes()


def _build_library(library: Library) -> Path:
    refuse_if_disabled()
    path = _library_path(library, _compiler())
    _build_once(path, library.what, lambda folder: _compile_library(library, folder))
    return path


def _compiler() -> str:
    name = os.environ.get("CXX", "c++")
    found = shutil.which(name)
    if found is None:
        raise JitUnavailable(
            f"no C++ compiler: {name!r} is not on the PATH (install g++, or set CXX)"
        )
    return found


def _library_path(library: Library, compiler: str) -> Path:
    import tvm_ffi

    key = hashlib.sha256()
    for source in sorted((CSRC / library.folder).iterdir()):
        if source.is_file():
            key.update(source.name.encode() + b"\0" + source.read_bytes())
    # Asking the compiler for its version costs a process; its file changes when it does.
    binary = Path(compiler).resolve()
    parts = (str(binary), binary.stat().st_mtime_ns, CFLAGS, LDFLAGS, tvm_ffi.__version__)
    key.update(repr((*parts, _processor())).encode())
    return env.cache_dir() / f"{library.name}-{key.hexdigest()[:16]}.so"


def _compile_library(library: Library, folder: Path) -> Path:
    from tvm_ffi import cpp

    with _BUILDING, _ninja_on_path():  # threads have one PATH
        return Path(
            cpp.build(
                library.name,
                sources=[str(source) for source in sorted((CSRC / library.folder).glob("*.cpp"))],
                extra_cflags=CFLAGS,
                extra_ldflags=LDFLAGS,
                build_directory=str(folder),
            )
        )


def _processor() -> str:
    """What -march=native looks at."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return " ".join(os.uname())
    names = ("model name", "flags", "CPU implementer", "CPU part", "Features")
    return "\n".join(sorted({line for line in lines if line.startswith(names)}))


def _checksum_path(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _is_whole(path: Path) -> bool:
    try:
        checksum = _checksum_path(path).read_text()
        return hashlib.sha256(path.read_bytes()).hexdigest() == checksum
    except OSError:
        return False


def _build_once(
    path: Path, what: str, compile_into: Callable[[Path], Path], level: int = logging.INFO
) -> None:
    """Make sure that `path` is there and whole; if it is not, `compile_into(an empty folder)` makes
    it. level: of the log lines."""
    if _is_whole(path):
        return
    from tvm_ffi.utils.lockfile import FileLock

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(str(path.with_suffix(".lock"))):
            if _is_whole(path):
                return  # another process built it while this one waited
            logger.log(level, "compiling %s (first start only) ...", what)
            started = time.monotonic()
            prefix = f"{path.stem}-"
            for abandoned in path.parent.glob(f"{prefix}*/"):  # by a build that was killed
                shutil.rmtree(abandoned, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=prefix, dir=path.parent) as folder:
                built = compile_into(Path(folder))
                checksum = Path(folder) / "checksum"
                checksum.write_text(hashlib.sha256(built.read_bytes()).hexdigest())
                # A reader between the two renames sees a mismatch and waits for the lock.
                os.replace(built, path)
                os.replace(checksum, _checksum_path(path))
            logger.log(level, "compiled in %.1f s: %s", time.monotonic() - started, path)
    except (RuntimeError, OSError) as error:
        raise JitUnavailable(f"compiling failed: {_gist(str(error))}") from error


def _gist(output: str) -> str:
    """The line of the build's output that names the cause."""
    lines = output.splitlines()
    return next((line for line in lines if "error:" in line), lines[0] if lines else "")


@contextmanager
def _ninja_on_path() -> Iterator[None]:
    """tvm-ffi runs "ninja" from the PATH; ours may sit in an environment that is not activated."""
    if shutil.which("ninja"):
        yield
        return
    import ninja

    before = os.environ.get("PATH")
    os.environ["PATH"] = os.pathsep.join(filter(None, (ninja.BIN_DIR, before)))
    try:
        yield
    finally:
        if before is None:
            del os.environ["PATH"]
        else:
            os.environ["PATH"] = before
