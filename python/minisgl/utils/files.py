"""Files that must not end what reads or writes them."""

from __future__ import annotations

import os
import sys
from typing import IO


def forget(file: IO[bytes] | IO[str]) -> None:
    """Let what is and was written to `file` vanish: its disk is full, or its reader is gone.

    Its buffer would be written again at the next flush, the interpreter's last one included.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, file.fileno())
    os.close(nowhere)


def open_closed_streams() -> None:
    """Let the standard streams that this process was started without lead to nowhere.

    Other files would get their numbers, and be written to by whoever reports an error.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)  # the lowest that is free
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode))
