"""A progress bar on stderr."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress


class Bar:
    """Mutable: it counts tokens. Without a `progress` it shows nothing."""

    def __init__(self, progress: Progress | None = None, what: str = "") -> None:
        self._progress = progress
        self._num_tokens = 0
        if progress:
            self._task = progress.add_task(what, total=None, tokens="")

    def update(self, done: int, total: int) -> None:
        if self._progress:
            self._progress.update(self._task, completed=done, total=total)

    def show(self, num_tokens: int, num_ended: int) -> None:
        self._num_tokens += num_tokens
        if self._progress:
            text = f"{self._num_tokens:,} tokens"
            self._progress.update(self._task, completed=num_ended, tokens=text)


@contextmanager
def progress_bar(what: str) -> Iterator[Bar]:
    """Show a bar for the block, named `what`, on a terminal or in a notebook; nothing elsewhere."""
    # Here, because a program without bars need not wait for rich.
    from rich import progress as columns
    from rich.console import Console

    console = Console(stderr=True)
    # Without widgets rich prints a warning at each refresh of a notebook's bar.
    if not (console.is_terminal or (console.is_jupyter and find_spec("ipywidgets"))):
        yield Bar()
        return
    with columns.Progress(
        columns.TextColumn("{task.description}"),
        columns.BarColumn(),
        columns.TaskProgressColumn(),
        *([columns.MofNCompleteColumn()] if what == "prompts" else []),
        columns.TextColumn("{task.fields[tokens]}"),
        columns.TimeRemainingColumn(),
        console=console,
        transient=True,
    ) as progress:
        yield Bar(progress, what)
