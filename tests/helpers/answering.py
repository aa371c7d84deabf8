"""A helper process for tests (`python -m helpers.answering`)."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from minisgl.utils.helper import limit_memory, serve


def answer(question: Any) -> Any:
    match question:
        case ["hold", _]:  # in one instruction of native code, for minutes
            return (10 ** (10**9)) % 7
        case ["sleep", seconds]:
            time.sleep(seconds)
            return "awake"
        case ["allocate", limit]:
            limit_memory(limit)
            try:
                return len(bytes(2 * limit))
            except MemoryError:
                return "no memory"
        case ["end", code]:
            os._exit(code)
        case ["signal", name]:
            os.kill(os.getpid(), signal.Signals[name])
        case ["process", _]:
            return os.getpid()
    return question


if __name__ == "__main__":
    serve(answer)
