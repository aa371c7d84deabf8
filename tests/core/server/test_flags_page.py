"""docs/flags.md has the output of `minisgl serve --help`, and each environment variable."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[3] / "docs" / "flags.md").read_text(encoding="utf-8")


def test_flags_page_is_the_help() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "minisgl", "serve", "--help"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "98"},
    )
    assert PAGE.split("```")[1].strip() == done.stdout.strip(), "put the new --help there"


@pytest.mark.parametrize("package", ["minisgl", "minisgl_gateway"])
def test_every_variable_is_on_the_page(package: str) -> None:
    env = pytest.importorskip(f"{package}.env", reason="not installed")
    variables = re.findall(r"^(MINISGL_\w+)", env.__doc__, re.MULTILINE)
    assert variables
    for variable in variables:
        assert re.search(rf"^\| `{variable}\b", PAGE, re.MULTILINE), variable
