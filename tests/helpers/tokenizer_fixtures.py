"""A tokenizer of each kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers.text_checkpoints import KINDS, make
from minisgl.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def by_kind(tmp_path_factory: Any) -> dict[str, Tokenizer]:
    root: Path = tmp_path_factory.mktemp("tokenizers")
    return {kind: load_tokenizer(make(root / kind, kind)) for kind in KINDS}


@pytest.fixture
def tokenizer(by_kind: dict[str, Tokenizer]) -> Tokenizer:
    return by_kind["byte_level"]
