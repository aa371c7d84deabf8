"""What a checkpoint recommends, and what it asks for in vain."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minisgl.core import SamplingParams
from minisgl.tokenizer.defaults import sampling_defaults


def test_what_nobody_does_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"top_k": 20, "repetition_penalty": 1.05, "num_beams": 4}))
    (tmp_path / "config.json").write_text("{}")
    assert sampling_defaults(tmp_path) == SamplingParams(top_k=20)
    [told] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "asks for repetition_penalty 1.05, num_beams 4, which is not done here" in told
