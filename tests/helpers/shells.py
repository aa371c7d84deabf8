"""The shell: in this process, as a process of its own, and in a pseudo-terminal."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import select
import subprocess
import sys
import termios
import time
from contextlib import redirect_stderr, redirect_stdout, suppress
from unittest.mock import patch

from minisgl.cli import run_command
from minisgl.message import ChatPrompt, TokenizeMsg

CHAT = (sys.executable, "-m", "minisgl", "chat", "--url")


def run(*command: str, text: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command,
        input=text,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
        env={**os.environ, **env},
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


def minisgl(*words: str, text: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, "-m", "minisgl", *words, text=text, **env)


def here(*words: str, text: str = "", **env: str) -> tuple[int, str, str]:
    """Run a command of `minisgl` in this process, with `text` as a pipe. Returns the exit code, the
    answers and the rest."""
    answers, rest = io.StringIO(), io.StringIO()
    piped = io.TextIOWrapper(io.BytesIO(text.encode()))
    with (
        patch.dict(os.environ, env),
        patch("os.isatty", return_value=False),
        patch.object(sys, "stdin", piped),
        redirect_stdout(answers),
        redirect_stderr(rest),
    ):
        try:
            code = run_command(list(words), time.monotonic())
        except SystemExit as end:  # argparse's
            code = int(end.code or 0)
    return code, answers.getvalue(), rest.getvalue()


def chat(url: str, text: str, *flags: str, **env: str) -> tuple[int, str, str]:
    return here("chat", "--url", url, *flags, text=text, **env)


def ask(url: str, *words: str, text: str = "", **env: str) -> tuple[int, str, str]:
    return here("run", "--url", url, *words, text=text, **env)


def said(message: TokenizeMsg) -> list[tuple[str, str]]:
    assert isinstance(message.prompt, ChatPrompt)
    return [(turn["role"], turn["content"]) for turn in message.prompt.messages]


class Terminal:
    """A pseudo-terminal with the shell in it. Mutable: `wait_for` consumes what it has seen."""

    def __init__(self, url: str, *flags: str, **env: str) -> None:
        self._ours, theirs = pty.openpty()
        self.shell = subprocess.Popen(
            [*CHAT, url, *flags],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            # Without a controlling terminal, Ctrl-C would be a character like any other.
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env={**os.environ, "TERM": "dumb", "PROMPT_TOOLKIT_NO_CPR": "1", **env},
        )
        os.close(theirs)
        self._seen = b""

    def type(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def wait_for(self, text: bytes) -> None:
        deadline = time.monotonic() + 60
        while text not in self._seen:
            ready, _, _ = select.select([self._ours], [], [], deadline - time.monotonic())
            assert ready, f"no {text!r} in {self._seen!r}"
            self._seen += os.read(self._ours, 4096)
        self._seen = self._seen.partition(text)[2]

    def leave(self) -> int:
        """Type Ctrl-D until the shell ends. (One typed while the terminal is switched to raw mode,
        just after the prompt has been printed, is lost.)
        """
        deadline = time.monotonic() + 60
        with suppress(OSError):  # EIO: the shell has closed its side
            while time.monotonic() < deadline:
                self.type(b"\x04")
                while select.select([self._ours], [], [], 0.2)[0]:
                    os.read(self._ours, 4096)
        return self.shell.wait(60)

    def close(self) -> None:
        self.shell.kill()
        self.shell.wait()
        os.close(self._ours)
