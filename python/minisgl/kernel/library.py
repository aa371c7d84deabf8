"""Loads the compiled C++ kernels. The compiler is imported only if it may be needed."""

from __future__ import annotations

from typing import Any

from minisgl import env
from minisgl.errors import MinisglError


class JitUnavailable(MinisglError):
    """Raised if something cannot be compiled or loaded here. The message says why, in one line."""


def refuse_if_disabled() -> None:
    if env.jit_disabled():
        raise JitUnavailable("MINISGL_DISABLE_JIT=1")


def load_cpu_library() -> Any:
    """Return the C++ kernels (`minisgl.kernel.jit.load_library`). Raises JitUnavailable."""
    refuse_if_disabled()
    from minisgl.kernel import jit

    return jit.load_library()
