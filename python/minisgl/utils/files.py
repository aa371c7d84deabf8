"""Repairs output streams that are broken or closed."""

from __future__ import annotations

import os
import sys
from typing import IO


def forget(file: IO[bytes] | IO[str]) -> None:
    """Let all writes to `file`, whose disk is full or whose reader is gone, go to /dev/null.

    Otherwise each later flush, also that at the interpreter's end, would fail again.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, file.fileno())
    os.close(nowhere)


def open_closed_streams() -> None:
    """Open /dev/null for each standard stream that this process was started without.

    Otherwise other files would get the numbers of these streams, and with them error reports.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)  # the lowest free number
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode))
