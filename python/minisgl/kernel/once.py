"""Builds a file once, in a folder that all processes use.

A built file is renamed to its final name only when it is complete. A checksum beside it detects a
damaged file before it is loaded; such a file is built again. Processes that start together wait for
one build. If it fails, none of them tries again.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final

from minisgl.errors import MinisglError
from minisgl.utils.logger import get_logger

logger = get_logger(__name__)

NO_SPACE: Final = "No space left on device"
"""A compiler that fails with this text can be tried again, because the source is not at fault."""


class JitUnavailable(MinisglError):
    """Raised if something cannot be compiled or loaded here. The message says why, in one line."""


def build_once(
    path: Path, what: str, compile_into: Callable[[Path], Path], level: int = logging.INFO
) -> None:
    """Make sure that the file `path` exists and is undamaged.

    compile_into: builds the file in an empty folder, and returns where. level: of the log lines.
    Raises JitUnavailable with the reason in one line.
    """
    if _is_whole(path):
        return
    if reason := _failures().get(path):
        raise JitUnavailable(reason)
    from tvm_ffi.utils.lockfile import FileLock

    began = time.time()
    failed = path.with_suffix(".failed")  # the reason, for processes that wait for the lock
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(str(path.with_suffix(".lock"))):
            if _is_whole(path):
                return  # another process built it while this one waited
            if failed.is_file() and failed.stat().st_mtime >= began:
                raise JitUnavailable(failed.read_text())
            try:
                _build(path, what, compile_into, level)
            except (RuntimeError, OSError) as error:
                with suppress(OSError):
                    failed.write_text(_reason(error, path))
                raise
    except JitUnavailable as error:
        _failures()[path] = str(error)
        raise
    except (RuntimeError, OSError) as error:
        _failures()[path] = reason = _reason(error, path)
        raise JitUnavailable(reason) from error


def _build(path: Path, what: str, compile_into: Callable[[Path], Path], level: int) -> None:
    logger.log(level, "compiling %s ...", what)
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


@cache
def _failures() -> dict[Path, str]:
    """Return the mutable table of this process's failed builds: path -> reason."""
    return {}


def _checksum_path(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _is_whole(path: Path) -> bool:
    try:
        checksum = _checksum_path(path).read_text()
        return hashlib.sha256(path.read_bytes()).hexdigest() == checksum
    except OSError:
        return False


def _reason(error: Exception, path: Path) -> str:
    reason = f"compiling failed: {gist(str(error))}"
    if isinstance(error, OSError) or NO_SPACE in str(error):
        reason += f" (kernels are kept in {path.parent}; MINISGL_CACHE_DIR names another folder)"
    return reason


def gist(output: str) -> str:
    """Return the line of a build's output that names the cause."""
    lines = output.splitlines()
    for sign in (NO_SPACE, "error:"):
        for line in lines:
            if sign in line:
                return line
    return lines[0] if lines else ""
