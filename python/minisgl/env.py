"""The environment variables that the core reads. No other module of it reads them.

MINISGL_DISABLE_OVERLAP_SCHEDULING=1  settle each step before the next is planned
MINISGL_CHECK_PLANS=1                 compare the plans of all ranks in every step, not in each 64th
MINISGL_CHECK_PAGES=1                 check in every step which pages it reads and writes: slow
MINISGL_LOG_LEVEL=info                debug, info, warning or error
MINISGL_LOG_FORMAT=text               text or json
MINISGL_CACHE_DIR                     the folder for compiled kernels
                                      (default: $XDG_CACHE_HOME/minisgl or ~/.cache/minisgl)
MINISGL_DISABLE_JIT=1                 compile nothing: use the plain-torch kernels
MINISGL_CPU_ISA                       the instruction set of the C++ kernels: one of CPU_ISAS
                                      (default: all that the CPU has)
"""

from __future__ import annotations

import os
from pathlib import Path

from minisgl.errors import ConfigError

CPU_ISAS = ("avx512bf16", "avx512vnni", "avx512", "avxvnni", "avx2", "sse2", "neon-bf16", "neon")


def check() -> None:
    """Raise ConfigError if a variable has a wrong value, whether or not this run would read it."""
    for read in (overlap_disabled, check_plans, check_pages, jit_disabled, cpu_isa, log_format):
        read()
    log_level()


def _flag(name: str) -> bool:
    value = os.environ.get(name, "0")
    if value not in ("0", "1", ""):
        raise ConfigError(f"{name} must be 0 or 1, got {value!r}")
    return value == "1"


def overlap_disabled() -> bool:
    return _flag("MINISGL_DISABLE_OVERLAP_SCHEDULING")


def check_plans() -> bool:
    return _flag("MINISGL_CHECK_PLANS")


def check_pages() -> bool:
    return _flag("MINISGL_CHECK_PAGES")


def jit_disabled() -> bool:
    return _flag("MINISGL_DISABLE_JIT")


def cpu_isa() -> str:
    """The name of an instruction set of `minisgl.utils.arch`, or "" for the CPU's best."""
    value = os.environ.get("MINISGL_CPU_ISA", "")
    if value and value not in CPU_ISAS:
        raise ConfigError(f"MINISGL_CPU_ISA must be one of {', '.join(CPU_ISAS)}, got {value!r}")
    return value


def log_level(default: str = "info") -> str:
    value = (os.environ.get("MINISGL_LOG_LEVEL") or default).lower()
    if value not in ("debug", "info", "warning", "error"):
        raise ConfigError(f"MINISGL_LOG_LEVEL must be debug, info, warning or error, got {value!r}")
    return value


def log_format() -> str:
    value = (os.environ.get("MINISGL_LOG_FORMAT") or "text").lower()
    if value not in ("text", "json"):
        raise ConfigError(f"MINISGL_LOG_FORMAT must be text or json, got {value!r}")
    return value


def cache_dir() -> Path:
    """The folder for compiled kernels; not created here."""
    if explicit := os.environ.get("MINISGL_CACHE_DIR"):
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "minisgl"


def triton_cache_dir() -> Path:
    """The folder where Triton keeps its compiled kernels, by its own rule."""
    if explicit := os.environ.get("TRITON_CACHE_DIR"):
        return Path(explicit)
    return Path(os.environ.get("TRITON_HOME") or Path.home()) / ".triton" / "cache"
