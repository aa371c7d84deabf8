"""Handles Ctrl-C, SIGTERM and a closed terminal as one request to end, at any time."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Final, NoReturn, Self

AGAIN_S: Final = 0.02
"""The delay before a lost KeyboardInterrupt is raised again. Most code in which Python loses an
exception takes less time."""

_NUMBERS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _interrupt() -> NoReturn:
    raise KeyboardInterrupt


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Delay the handling of signals that come in the block until its end.

    To block the signals is not enough: another thread (of a library) then gets them, and Python
    still runs the handler in the main thread.
    """
    if threading.current_thread() is not threading.main_thread():  # no handler runs in this one
        yield
        return
    came: list[int] = []
    before = [(n, signal.signal(n, lambda signum, _: came.append(signum))) for n in _NUMBERS]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)
        for signum in came:
            signal.raise_signal(signum)


class Signals:
    """Handles the signals inside its `with` block. Mutable: `first` and `second` may be set.

    number: the signal that came first; None before that.

    The first signal calls `first`, which by default raises KeyboardInterrupt. The second calls
    `second` and ends this process at once. SIGHUP never counts as the second, because a shell and
    the kernel both send it when a terminal is closed. If SIGHUP was ignored (nohup), it still is.

    Python drops an exception that is raised in a `__del__` or in a callback of a weak reference. A
    KeyboardInterrupt that is lost in this way is raised again shortly after.
    """

    def __init__(self) -> None:
        self.first: Callable[[], None] = _interrupt
        self.second: Callable[[], None] = _interrupt
        self.number: int | None = None
        self._num_seen = 0

    def __enter__(self) -> Self:
        is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        numbers = [n for n in _NUMBERS if n != signal.SIGHUP or not is_ignored]
        self._before = [(number, signal.signal(number, self._handle)) for number in numbers]
        self._unraisable, sys.unraisablehook = sys.unraisablehook, self._on_unraisable
        return self

    def __exit__(self, *exc_info: object) -> None:
        sys.unraisablehook = self._unraisable
        for number, handler in self._before:
            signal.signal(number, handler)

    def check(self) -> None:
        """Raise KeyboardInterrupt if a signal has come.

        Callbacks of the import system may have dropped the KeyboardInterrupt of its handler.
        """
        if self._num_seen:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """In the block, SIGINT raises KeyboardInterrupt; the other signals end the process."""
        self.first = sys.exit
        ours = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, ours)

    def _on_unraisable(self, lost: sys.UnraisableHookArgs) -> None:
        if not issubclass(lost.exc_type, KeyboardInterrupt):
            self._unraisable(lost)
            return
        self._num_seen = 0
        main = threading.main_thread().ident
        assert main is not None
        threading.Timer(AGAIN_S, signal.pthread_kill, (main, signal.SIGINT)).start()

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self._num_seen += 1
        if self._num_seen == 1:
            self.number = signum
            self.first()
        elif signum != signal.SIGHUP:
            self.second()
            os._exit(128 + signum)
