"""The core's own chat, which `minisgl serve --shell` has without the gateway."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from helpers.scripted_server import ScriptedServer
from helpers.shells import run, said

SHELL = "import sys; from minisgl.shell import run_shell; sys.exit(run_shell(sys.argv[1]))"


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        yield server


def chat(url: str, text: str) -> tuple[int, str, str]:
    done = run(sys.executable, "-c", SHELL, url, text=text, HTTP_PROXY="http://127.0.0.1:9")
    return done.returncode, done.stdout, done.stderr


def test_a_chat_remembers_until_reset(server: ScriptedServer) -> None:
    before = len(server.received)
    text = "one two\nthree\n\n!refuse\n/reset\nfour !fail\nfive \x1b[2J\n/exit\nno\n"
    code, answers, rest = chat(server.url, text)
    assert code == 1  # two were not answered
    assert answers == "one two .\nthree .\nfour \nfive [2J .\n"
    assert re.fullmatch(r"Chatting\..*\ntoo long\nA new chat\.\nout of luck\n", rest)
    assert [said(message) for message in server.received[before:]] == [
        [("user", "one two")],
        [("user", "one two"), ("assistant", "one two ."), ("user", "three")],
        [
            *[("user", "one two"), ("assistant", "one two .")],
            *[("user", "three"), ("assistant", "three ."), ("user", "!refuse")],
        ],
        [("user", "four !fail")],
        [("user", "five \x1b[2J")],
    ]


def test_a_server_that_is_gone_is_no_traceback() -> None:
    code, answers, rest = chat("http://127.0.0.1:9", "one\n")
    assert (code, answers) == (1, "")
    assert "refused" in rest


def test_bytes_that_are_no_text(server: ScriptedServer) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SHELL, server.url],
        input=b"caf\xe9\ntwo\n",
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "utf-8:strict"},
        timeout=170,
        check=False,
    )
    assert (done.returncode, done.stdout.decode()) == (0, "caf\ufffd .\ntwo .\n"), done.stderr


def test_all_answered_is_exit_code_0(server: ScriptedServer) -> None:
    assert chat(server.url, "one\nquit\n")[:2] == (0, "one .\n")
