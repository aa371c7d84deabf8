"""Shows what a server does while it starts, for `minisgl chat` and `minisgl run`.

Their log has warnings only, because the terminal is the chat's. On a terminal the newest line of
the log stands beside a spinner and the seconds, and goes when the server is ready. Elsewhere each
line is written once. All of it is on stderr.
"""

from __future__ import annotations

import threading
from typing import Final

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column

from minisgl.utils.logger import tell_lines

FIRST: Final = "starting a server"


class StartLines:
    """Shows the lines of a start. Mutable: it knows whether the start is over.

    downloads: the start may download a model, whose bars are on stderr, too. So the spinner waits
    for `begin`, and lines before it are written.
    """

    def __init__(self, console: Console | None = None, *, downloads: bool = False) -> None:
        self._console = console or Console(stderr=True, highlight=False, soft_wrap=True)
        self._spinner: Progress | None = None
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            text = Column(ratio=1, no_wrap=True, overflow="ellipsis")
            self._spinner = Progress(
                SpinnerColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.description}", table_column=text, markup=False, style="dim"),
                console=self._console,
                expand=True,
                transient=True,
                redirect_stdout=False,
            )
            self._task = self._spinner.add_task(FIRST, total=None)
        self._downloads = downloads
        self._is_over = False
        self._lock = threading.Lock()

    def __enter__(self) -> StartLines:
        self._end_lines = tell_lines(self.show)
        if self._spinner and not self._downloads:
            self.begin()
        else:
            self.show(FIRST)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.end()

    def begin(self) -> None:
        """Show the spinner, if this is a terminal."""
        if self._spinner:
            self._spinner.start()

    def show(self, text: str) -> None:
        """Show a line. Only its first line, if it is a table. Nothing after the end."""
        line = text.partition("\n")[0].removesuffix(":")
        with self._lock:
            if self._is_over:
                return
            if self._spinner and self._spinner.live.is_started:
                self._spinner.update(self._task, description=line)
            else:
                self._console.print(line, markup=False, style="dim")

    def end(self) -> None:
        """Stop. A second call does nothing."""
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
        self._end_lines()
        if self._spinner:
            self._spinner.stop()
