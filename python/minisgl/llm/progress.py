"""A progress bar on stderr."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from minisgl.llm.llm import Bar


@contextmanager
def progress_bar(what: str) -> Iterator[Bar]:
    """Show a bar for the block, named `what`, on a terminal or in a notebook; nothing elsewhere."""
    console = Console(stderr=True)
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        # rich leaves an empty line for a bar that it cannot draw.
        disable=not (console.is_terminal or console.is_jupyter),
    )
    with progress:
        yield _RichBar(progress, what)


class _RichBar(Bar):
    def __init__(self, progress: Progress, what: str) -> None:
        self._progress = progress
        self._task = progress.add_task(what, total=None)

    def update(self, done: int, total: int) -> None:
        self._progress.update(self._task, completed=done, total=total)

    def advance(self, count: int) -> None:
        self._progress.advance(self._task, count)
