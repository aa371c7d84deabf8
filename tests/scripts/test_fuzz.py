"""`scripts/fuzz.py` in short, without atheris: the corpus that it keeps, and changes of it."""

from __future__ import annotations

import runpy
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).parents[2]
CORPUS = ROOT / "tests/fuzz"
NAMES = sorted(path.name for path in CORPUS.iterdir())
FAST = [name for name in NAMES if name != "templates"]
"""A template that computes for 10 s of a core is right to do so."""


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    folder = str(tmp_path_factory.mktemp("fuzz"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", folder)
        patch.setenv("MINISGL_CACHE_DIR", folder)
        patch.syspath_prepend(str(ROOT / "scripts"))
        yield runpy.run_path(str(ROOT / "scripts/fuzz_targets.py"))["TARGETS"]


def test_each_target_has_a_corpus(targets: dict[str, Any]) -> None:
    assert sorted(targets) == NAMES


@pytest.mark.parametrize("target", NAMES)
def test_the_corpus(target: str, targets: dict[str, Any]) -> None:
    for path in sorted((CORPUS / target).iterdir()):
        targets[target].run(path.read_bytes())


@st.composite
def changed(draw: st.DrawFn, target: str) -> bytes:
    """An input of the corpus with bytes taken out, put in or repeated."""
    files = sorted((CORPUS / target).iterdir())
    data = draw(st.sampled_from(files)).read_bytes()
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, len(data)))
        end = draw(st.integers(start, min(len(data), start + 40)))
        piece = draw(st.one_of(st.binary(max_size=8), st.just(data[start:end] * 2)))
        data = data[:start] + piece + data[end:]
    return data


@pytest.mark.parametrize("target", FAST)
@settings(max_examples=25, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_changes_of_the_corpus(target: str, targets: dict[str, Any], data: st.DataObject) -> None:
    targets[target].run(data.draw(changed(target)))
