"""What every benchmark writes beside its numbers: machine, versions, commit, command."""

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

BUSY_SHARE = 0.2  # of two cores, a server and its client are left with less than one each

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
    """Where and with what something was measured. Imports torch only if the caller did."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", "-m", "minisgl.benchmark", *map(_portable, sys.argv[1:])]),
        "commit": _commit(),
        "python": platform.python_version(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "gpu": _gpu_name(),
        "versions": versions,
    }


def machine_load() -> dict[str, float]:
    """How busy the machine is before a measurement; a warning is printed when it is.

    busy_share: of all cores, over half a second. load_1min: runnable tasks (0 where unknown).
    """
    busy = psutil.cpu_percent(interval=0.5) / 100
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if busy > BUSY_SHARE:
        print(f"note: other work takes {busy:.0%} of this machine; timings will show it")
    return {"busy_share": round(busy, 3), "load_1min": round(load, 2)}


def write_json(path: str | Path, results: dict[str, Any], *, is_whole: bool = True) -> None:
    """`results` with the environment, at `path`. Not whole: some, in case no more follow.

    Raises ConfigError where that cannot be written.
    """
    path = Path(path)
    content = json.dumps({"environment": environment(), **results}, indent=2)
    # A line for each number of a list would make most of the file.
    content = re.sub(r'\[[^]["{}]*\]', lambda found: " ".join(found[0].split()), content)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the results cannot be written to {path} ({error})") from error
    if is_whole:
        print(f"wrote {path}")


def _portable(argument: str) -> str:
    """An absolute path says more about a machine than about a measurement."""
    return Path(argument).name if argument.startswith("/") else argument


def _commit() -> str | None:
    """The checkout's commit, "+" when there are changes; MINISGL_COMMIT wins, for a copy of one."""
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
