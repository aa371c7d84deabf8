"""Run tests of the core where the other four packages do not exist.

    python scripts/core_alone.py                                all of tests/core
    python scripts/core_alone.py tests/core/scheduler -n 2      pytest's arguments

Tests that use another package say so (`needs`), and skip. The tests' fakes of a device are the one
part that is there: `minisgl_bench.fakes`, which measures with them, too.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]

# An editable install finds the checkout's packages by a finder, or by an entry of the path.
HIDDEN = """
import os, sys
here = os.path.dirname(__file__)
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
sys.path[:] = [at for at in sys.path if at == here or not os.path.isdir(at + "/minisgl")]
"""


def copy_core(folder: Path) -> None:
    """Make a folder with the core's package alone, and what is compiled of it."""
    shutil.copytree(ROOT / "python/minisgl", folder / "minisgl")
    (folder / "sitecustomize.py").write_text(HIDDEN)


def copy_tests(folder: Path) -> Path:
    """Make a folder with the core and its tests. Returns the folder of the packages."""
    packages = folder / "python"
    copy_core(packages)
    bench = packages / "minisgl_bench"
    shutil.copytree(ROOT / "python/minisgl_bench/fakes", bench / "fakes")
    (bench / "__init__.py").touch()
    (bench / "manifest.py").write_text("ROWS: list = []\n")
    for part in ("docs", "tests/core", "tests/helpers", "tests/templates"):
        shutil.copytree(ROOT / part, folder / part)
    for part in ("tests/conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / part, folder / part)
    return packages


def environment(packages: Path) -> dict[str, str]:
    """Return the environment of a process that finds these packages of ours, and no others."""
    return {**os.environ, "PYTHONPATH": str(packages)}


def main(words: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        env = environment(copy_tests(Path(folder)))
        command = [sys.executable, "-m", "pytest", *(words or ["tests/core"])]
        return subprocess.run(command, cwd=folder, env=env, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
