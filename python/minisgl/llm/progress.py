"""A progress bar on stderr."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from minisgl.llm.llm import Bar


@contextmanager
def progress_bar(what: str) -> Iterator[Bar]:
    """Show a bar for the block, named `what`, on a terminal or in a notebook; nothing elsewhere."""
    console = Console(stderr=True)
    # Without widgets rich prints a warning at each refresh of a notebook's bar.
    is_visible = console.is_terminal or (console.is_jupyter and find_spec("ipywidgets") is not None)
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        *([MofNCompleteColumn()] if what == "prompts" else []),
        TextColumn("{task.fields[tokens]}"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        # Without this rich would write an empty line for a bar that it cannot draw.
        disable=not is_visible,
    )
    with progress:
        yield _RichBar(progress, what)


class _RichBar(Bar):
    """Mutable: it counts tokens."""

    def __init__(self, progress: Progress, what: str) -> None:
        self._progress = progress
        self._num_tokens = 0
        self._task = progress.add_task(what, total=None, tokens="")

    def update(self, done: int, total: int) -> None:
        self._progress.update(self._task, completed=done, total=total)

    def show(self, num_tokens: int, num_ended: int) -> None:
        self._num_tokens += num_tokens
        text = f"{self._num_tokens:,} tokens"
        self._progress.update(self._task, completed=num_ended, tokens=text)
