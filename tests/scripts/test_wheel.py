"""A built wheel has all packages with their data: an answer comes from it outside the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("setuptools", minversion="77", reason="it builds the wheel, without a network")

ROOT = Path(__file__).parents[2]
FILES = ("pyproject.toml", "README.md", "LICENSE")
WHERE = """
import minisgl, minisgl_bench, minisgl_gateway, minisgl_kernels, minisgl_zoo, sys
from minisgl import plugins

ours = (minisgl, minisgl_bench, minisgl_gateway, minisgl_kernels, minisgl_zoo)
assert all(package.__file__.startswith(sys.argv[1]) for package in ours)
assert (minisgl_kernels.CSRC / "skinny.cu").is_file()
assert {row.target.partition(".")[0] for row in plugins.installed()} >= {"minisgl", "minisgl_zoo"}
"""


def test_a_wheel_answers(tmp_path: Path) -> None:
    source, site = tmp_path / "source", tmp_path / "site"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "python", source / "python", ignore=ignored)
    for name in FILES:
        shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "-q"]
    built = [*pip, "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(source)]
    subprocess.run(built, check=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    env = {**os.environ, "PYTHONPATH": str(site)}
    subprocess.run(
        [sys.executable, "-c", WHERE, str(site)], cwd=tmp_path, env=env, check=True, timeout=60
    )
    answer = subprocess.run(
        [sys.executable, "-m", "minisgl", "run", "--set", "max_tokens=8", "Who are you?"],
        cwd=tmp_path, env=env, check=True, timeout=150, text=True, stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert answer.stdout.strip()
