"""A helper process, which answers one question after another and can be ended during any of them.

For work that cannot be bounded from within: a checkpoint's template, a client's grammar. Native
code can hold the interpreter's lock for minutes, and no thread can interrupt it. So the operating
system ends the helper when a question has taken its CPU time, and the next question starts another
one. It also ends a helper, during native code too, when the process that asks has ended. ::

    Helper.ask  --length, seconds, JSON-->  serve: answer(question)     over one socket
                <-----length, 0, JSON-----
                ------------ nothing, ever ------------                  a second one: its end
                                                                         ends the helper
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

_HEAD: Final = struct.Struct("<Qd")  # bytes of the JSON; CPU seconds that a question has
_PIECE: Final = 1 << 20
_BUSY_S: Final = 30.0
_SLOWER: Final = 20.0
"""A helper is also ended after this wall time: so many seconds, and so many more for each second of
CPU time. It has been stopped, or gets little of a core. A start takes 0.1 s of a quiet core."""
_END_S: Final = 0.05  # from the end of its socket to its exit code


class HelperEnded(Exception):
    """The helper ended before its answer. The text says why, after "it"."""


class Helper:
    """Runs `python -m module`, which calls `serve`. Mutable: it starts the process with the first
    question, and again after its end. Threads may ask at the same time; they wait for each other.
    """

    def __init__(self, module: str, args: Sequence[str] = ()) -> None:
        """args: of the command line."""
        self._command = [sys.executable, "-P", "-m", module, *args]
        self.process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._lifeline: socket.socket | None = None  # the helper ends when it is closed
        self._lock = threading.Lock()

    @property
    def is_busy(self) -> bool:
        """Whether it answers a question now, for which the next one would wait."""
        return self._lock.locked()

    def ask(self, question: bytes, cpu_s: float) -> Any:
        """Return the answer to a question, which `packed` made. Raises HelperEnded."""
        with self._lock:
            if self.process is None or self.process.poll() is not None:
                self._start()
            answer = None
            try:
                answer = self._exchange(question, cpu_s)
            finally:  # after Ctrl-C, too, or the next question would get this answer
                if answer is None:
                    code = self._end()
                    self._start()  # now, so that the next question does not wait for it
            if answer is None:
                raise HelperEnded(_reason(code, cpu_s))
            return _unpacked(answer)

    def _start(self) -> None:
        self._end()  # closes the socket of one that was killed
        ours, theirs = socket.socketpair()
        lifeline, its_lifeline = socket.socketpair()
        with theirs, its_lifeline:
            self.process = subprocess.Popen(
                self._command,
                stdin=theirs.fileno(),
                stdout=its_lifeline.fileno(),
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
        self._socket, self._lifeline = ours, lifeline

    def _exchange(self, question: bytes, cpu_s: float) -> bytes | None:
        assert self._socket
        self._socket.settimeout(_BUSY_S + _SLOWER * cpu_s)
        with contextlib.suppress(TimeoutError, ConnectionError):
            self._socket.sendall(_HEAD.pack(len(question), cpu_s) + question)
            if head := _read(self._socket, _HEAD.size):
                return _read(self._socket, _HEAD.unpack(head)[0])
        return None

    def _end(self) -> int:
        """End the process, if there is one. Returns its exit code, or minus the signal."""
        if self._socket and self._lifeline:
            self._socket.close()
            self._lifeline.close()
            self._socket = self._lifeline = None
        process, self.process = self.process, None
        if process is None:
            return 0
        try:
            return process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    def __del__(self) -> None:
        self._end()


def serve(answer: Callable[[Any], Any]) -> None:
    """Answer the questions of the process that started this one, until it ends.

    `answer` gets a question, and returns JSON. An exception ends this process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks
    link, lifeline = socket.socket(fileno=os.dup(0)), socket.socket(fileno=os.dup(1))
    os.dup2(2, 1)  # nothing is printed into the lifeline
    # SIGIO ends this process when the asker ends. It must not come from `link`: a question's SIGIO
    # can arrive after the question itself has been read.
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    while head := _read(link, _HEAD.size):
        size, cpu_s = _HEAD.unpack(head)
        if (data := _read(link, size)) is None:
            return
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        reply = packed(answer(_unpacked(data)))
        signal.setitimer(signal.ITIMER_PROF, 0)
        link.sendall(_HEAD.pack(len(reply), 0.0) + reply)


def packed(value: Any) -> bytes:
    """Return a question as JSON. Its texts may have lone surrogates.

    Raises TypeError, ValueError or RecursionError if `value` is no JSON.
    """
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def limit_memory(extra_bytes: int) -> None:
    """Let this process take at most so many bytes more. This has an effect on Linux only."""
    if sys.platform != "linux":
        return
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limits = [limit for limit in (hard, used + extra_bytes) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))


def _reason(code: int, cpu_s: float) -> str:
    if code in (-signal.SIGPROF, -signal.SIGIO, -signal.SIGKILL):  # the last two by `_end`
        return f"takes more than {cpu_s:.2g} s"
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return f"ends the process that runs it ({how})"


def _unpacked(data: bytes) -> Any:
    return json.loads(data.decode("utf-8", "surrogatepass"))


def _read(link: socket.socket, size: int) -> bytes | None:
    """Return so many bytes; None at the end."""
    pieces: list[bytes] = []
    while size:
        piece = link.recv(min(size, _PIECE))
        if not piece:
            return None
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)
