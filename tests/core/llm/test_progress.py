"""The progress bar: its contents, and that a notebook without widgets has none."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from minisgl.llm import progress


@pytest.mark.parametrize(
    ("kind", "is_shown"), [("terminal", True), ("notebook", False), ("pipe", False)]
)
def test_share_prompts_tokens_and_time_left(
    kind: str, is_shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = io.StringIO()
    terminal, notebook = kind == "terminal", kind == "notebook"
    console = Console(file=file, force_terminal=terminal, force_jupyter=notebook, width=100)
    monkeypatch.setattr("rich.console.Console", lambda **_: console)
    monkeypatch.setattr(progress, "find_spec", lambda name: None)  # no ipywidgets
    with progress.progress_bar("prompts") as bar:
        bar.update(0, 4)
        bar.show(1200, 2)
    said = file.getvalue()
    assert all(
        (part in said) == is_shown for part in ("prompts", "50%", "2/4", "1,200 tokens", ":")
    )
    assert bool(said) == is_shown
