"""`scripts/first_hour.py`: what it reads out of pip's log, and what it says."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(ROOT / "scripts" / "first_hour.py")))


def test_bytes_are_those_that_pip_names(script: SimpleNamespace, tmp_path: Path) -> None:
    wheel = tmp_path / "torch-2.13.0-cp311.whl"
    wheel.write_bytes(b"x" * 1000)
    log = f"""\
2026-11-23T21:05:00   Downloading mpmath-1.3.0-py3-none-any.whl (536 kB)
2026-11-23T21:05:01   Downloading numpy-2.4.6-cp311.whl (16.9 MB)
2026-11-23T21:05:02   Downloading idna-3.20.metadata (950 bytes)
2026-11-23T21:05:03 Processing {wheel}
2026-11-23T21:05:04 Processing {wheel}
2026-11-23T21:05:05   Using cached rich.whl (243 kB)
"""
    assert script.downloaded(log) == 536_000 + 16_900_000 + 950
    assert script.local_bytes(log) == 1000


def test_the_sentences_have_the_sums(script: SimpleNamespace) -> None:
    result = {
        "machine": "2 cores, x86_64", "clone_s": 1.3, "install_s": 200.0, "start_s": 5.0,
        "browser_to_answer_s": 2.5, "total_s": 208.8, "clone_bytes": 20e6,
        "packages_http_bytes": 30e6, "packages_local_bytes": 190e6, "page_bytes": 74e3,
    }  # fmt: skip
    said = script.sentences(result)
    assert "209 s and 240 MB (190 MB of them torch, from a local copy)" in said
    assert "from a folder" not in script.sentences(result | {"packages_local_bytes": 0})
