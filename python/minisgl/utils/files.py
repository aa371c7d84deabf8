"""Output streams that are broken or closed."""

from __future__ import annotations

import os
import sys
from typing import IO


def forget(file: IO[bytes] | IO[str]) -> None:
    """Discard everything written to `file`, whose disk is full or whose reader is gone.

    Otherwise the next flush, the one at the interpreter's end included, would write its buffer and
    fail again.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, file.fileno())
    os.close(nowhere)


def open_closed_streams() -> None:
    """Open /dev/null as each standard stream that this process was started without.

    Otherwise other files get the numbers of the streams, and error reports are written to them.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)  # the lowest that is free
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode))
