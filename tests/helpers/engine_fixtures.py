"""A tiny checkpoint, and transformers' model of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.engine_runs import Reference, save_reference


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return save_reference(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def folder(reference: Reference) -> Path:
    return reference[0]
