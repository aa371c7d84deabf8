"""Compiles a grammar in a helper process, which can be stopped.

llguidance bounds the work of a mask, but not all of the work of compiling: the intersection of a
few patterns of a schema took more than 40 s, and the server ended because its tokenizer hung. So a
helper process compiles each grammar first. The operating system ends it after `LIMIT_S` of CPU
time. A grammar that it compiles is no problem for a rank: the helper's vocabulary is the 256 bytes,
and with a checkpoint's vocabulary compiling and the first mask took the same time within 20 %.

A process starts its helper with the first grammar (0.1 s), and another one when it was ended. The
helper ends when its input ends.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from functools import lru_cache
from typing import Final

import llguidance

LIMITS: Final = llguidance.LLParserLimits(verbose_errors=False, max_items_in_row=20_000)
"""Bounds of the work of a mask. 2,000 items would refuse a list of 10,000 choices, whose mask takes
20 ms."""
LIMIT_S: Final = 0.3
"""CPU time of compiling and the first mask. 161 schemas took at most 0.6 ms, 10,000 choices 110 ms.
Each rank compiles again, and its running streams may wait as long."""
TOO_LONG: Final = (
    f"it takes more than {LIMIT_S} s to compile; use a simpler schema, regex or grammar"
)
_BUSY_S: Final = 10.0  # wall time after which the helper is ended even if it gets no CPU time
_TOKEN: Final = re.compile(r"<\[\d+\]>")
_ANY_TOKEN: Final = "<[256]>"  # a special one of the helper's vocabulary


def problem(grammar: str) -> str:
    """Return why a grammar cannot be compiled, "" if it can, `TOO_LONG` after `LIMIT_S`."""
    return _helper(os.getpid()).ask(grammar)


@lru_cache(1)
def _helper(pid: int) -> _Helper:
    """Return the helper of the process `pid`. A fork does not share its parent's."""
    return _Helper()


class _Helper:
    """Mutable: it starts the process with the first grammar, and again after its end."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def ask(self, grammar: str) -> str:
        with self._lock:
            if self._process is None:
                self._process = _started()
            timer = threading.Timer(_BUSY_S, self._process.kill)
            timer.start()
            try:
                assert self._process.stdin
                assert self._process.stdout
                self._process.stdin.write(json.dumps(grammar) + "\n")
                self._process.stdin.flush()
                line = self._process.stdout.readline()
            except BrokenPipeError:
                line = ""
            finally:
                timer.cancel()
            if line:
                return str(json.loads(line))
            self._process.communicate()
            self._process = None  # in case no other one can start
            self._process = _started()  # now, so that the next grammar does not wait for it
            return TOO_LONG


def _started() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "minisgl.grammar.trial"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        text=True,
        encoding="utf-8",
    )


def _serve() -> None:
    """For each line with a grammar, write a line with the problem. The timer's signal ends this."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this
    vocabulary = llguidance.LLTokenizer("byte")
    for line in sys.stdin:
        grammar = _TOKEN.sub(_ANY_TOKEN, json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
        matcher = llguidance.LLMatcher(vocabulary, grammar, limits=LIMITS, log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(matcher.get_error()), flush=True)


if __name__ == "__main__":
    _serve()
