"""Write results as JSON, with the machine, the versions, the commit and the command."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from minisgl.errors import ConfigError

BUSY_SHARE = 0.2  # above it, a server and its client have less than a core each on two cores

_PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "flashinfer-python",
    "transformers",
    "msgspec",
    "pyzmq",
    "aiohttp",
)


def environment() -> dict[str, Any]:
    """Return machine, versions, commit and command. Does not import torch."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", *_program(), *map(_portable, sys.argv[1:])]),
        "commit": _commit(),
        "python": platform.python_version(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "gpu": _gpu_name(),
        "versions": versions,
    }


def machine_load() -> dict[str, float]:
    """Return how busy the machine is before a measurement. Prints a warning above `BUSY_SHARE`.

    busy_share: the busy share of all cores, over half a second. load_1min: the mean number of
    runnable tasks of the last minute (0 where the system does not say).
    """
    busy = psutil.cpu_percent(interval=0.5) / 100
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if busy > BUSY_SHARE:
        print(f"note: other processes use {busy:.0%} of this machine, which distorts timings")
    return {"busy_share": round(busy, 3), "load_1min": round(load, 2)}


def write_json(path: str | Path, results: dict[str, Any], *, is_whole: bool = True) -> None:
    """Write `results` and the environment to `path`. Prints the path if they are whole.

    A benchmark may write partial results first, in case it is interrupted. Raises ConfigError if
    the file cannot be written.
    """
    path = Path(path)
    content = json.dumps({"environment": environment(), **results}, indent=2)
    # Put a list of numbers on one line; one line per number would be most of the file.
    content = re.sub(r'\[[^]["{}]*\]', lambda found: " ".join(found[0].split()), content)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the results cannot be written to {path} ({error})") from error
    if is_whole:
        print(f"wrote {path}")


def _portable(argument: str) -> str:
    """Return an argument; of an absolute path only the last part, since the rest is the
    machine's."""
    return Path(argument).name if argument.startswith("/") else argument


def _program() -> list[str]:
    """Return the arguments of `python`: a file of scripts/, or a package that runs benchmarks. The
    console script `minisgl` has no module; it does what the package does."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None and sys.argv[0].endswith(".py"):
        return [f"scripts/{Path(sys.argv[0]).name}"]
    name = spec.name.removesuffix(".__main__") if spec else "minisgl"
    return ["-m", name if name in ("minisgl", "minisgl_bench.studies") else "minisgl_bench"]


def _commit() -> str | None:
    """Return the checkout's commit, with "+" if it has changes.

    MINISGL_COMMIT replaces it, for a copy of a checkout without git.
    """
    if named := os.environ.get("MINISGL_COMMIT"):
        return named
    folder = Path(__file__).parent
    try:
        commit = _git(folder, "rev-parse", "--short=12", "HEAD")
        return commit + ("+" if _git(folder, "status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(folder: Path, *command: str) -> str:
    done = subprocess.run(
        ["git", *command], cwd=folder, check=True, capture_output=True, text=True, timeout=10
    )
    return done.stdout.strip()


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _gpu_name() -> str | None:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
