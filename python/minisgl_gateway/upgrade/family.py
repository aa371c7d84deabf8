"""The processes of one server over its upgrades: the first one, and its successors.

The first process is the one that a service manager, a container or a terminal knows. So it stays
until the last successor ends: it passes signals on, and its exit code is the last one's. All
successors have one end of a pair of sockets. There each writes its process id when it takes over,
and reads the end of the file when the first process has gone. The first one reads the end when all
successors have gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket

from minisgl.errors import EngineError


class FirstProcess:
    """The first process's end. Mutable: it notes the last successor."""

    def __init__(self) -> None:
        self._ours, self.theirs = socket.socketpair()
        self._last: int | None = None

    def close(self) -> None:
        """Forget a successor that has not started."""
        self._ours.close()
        self.theirs.close()

    def pass_on(self, signum: int) -> None:
        """Send a signal to the successor that serves."""
        if self._last:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._last, signum)

    async def watch(self) -> None:
        """Wait until all successors have ended. Raises EngineError if the last one failed."""
        self.theirs.close()
        reader, writer = await asyncio.open_unix_connection(sock=self._ours)
        code = None
        try:
            while line := await reader.readline():
                word, *numbers = line.split()
                pid = int(numbers[0])
                if word == b"serves":
                    self._last, code = pid, None
                elif pid == self._last:
                    code = int(numbers[1])
        finally:
            writer.close()
        if code != 0:
            how = f"with exit code {code}" if code else "without a word"
            raise EngineError(f"the server that took over has ended {how}; the log above says why")
