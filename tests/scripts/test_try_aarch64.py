"""The kernels' products on aarch64: the short form of `scripts/try_aarch64.py`."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = ("aarch64-linux-gnu-g++", "qemu-aarch64")
MISSING = [program for program in PROGRAMS if not shutil.which(program)]
SCRIPT = Path(__file__).parents[2] / "scripts" / "try_aarch64.py"


def test_what_is_missing_is_named() -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT], env={"PATH": ""}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert f"{' and '.join(PROGRAMS)} not found: apt install" in done.stdout


@pytest.mark.skipif(bool(MISSING), reason=f"needs {' and '.join(MISSING)}")
@pytest.mark.timeout(400)  # it compiles
def test_products_on_aarch64() -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, "--short", "--sets", "neon-bf16"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[100%]" in done.stdout
