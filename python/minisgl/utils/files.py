"""Files that must not end what writes them."""

from __future__ import annotations

import os
from typing import IO


def forget(file: IO[bytes] | IO[str]) -> None:
    """Let what is and was written to `file` vanish: its disk is full, or its reader is gone.

    Its buffer would be written again at the next flush, the interpreter's last one included.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, file.fileno())
    os.close(nowhere)
