"""The shell as a user meets it: a process with a pipe or a terminal, against a scripted server."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from helpers.scripted_server import ScriptedServer
from minisgl.message import ChatPrompt, TokenizeMsg
from minisgl.shell.client import Chat, ChatError


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        yield server


def chat(url: str, text: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "minisgl.shell", "--url", url],
        input=text,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.stderr == ""
    return done.returncode, done.stdout


def said(message: TokenizeMsg) -> list[tuple[str, str]]:
    assert isinstance(message.prompt, ChatPrompt)
    return [(turn["role"], turn["content"]) for turn in message.prompt.messages]


def test_a_piped_chat(server: ScriptedServer) -> None:
    before = len(server.received)
    code, output = chat(
        server.url,
        "one two\nthree\n\n/system be brief\nfour\n!refuse\nfive\n"
        "/reset\nsix !fail\nseven\n/exit\nno\n",
    )
    assert code == 1  # two were not answered
    assert "one two .\n" in output
    assert re.search(r"2 tokens; first after \d+ ms, then [\d.]+ tokens/s; 1 of 2 prompt", output)
    assert "too long\n" in output
    assert "out of luck\n" in output
    assert [said(message) for message in server.received[before:]] == [
        [("user", "one two")],
        [("user", "one two"), ("assistant", "one two ."), ("user", "three")],
        [("system", "be brief"), ("user", "four")],
        [("system", "be brief"), ("user", "four"), ("assistant", "four ."), ("user", "!refuse")],
        [("system", "be brief"), ("user", "four"), ("assistant", "four ."), ("user", "five")],
        [("user", "six !fail")],
        [("user", "seven")],
    ]


def test_unknown_commands_show_the_help(server: ScriptedServer) -> None:
    code, output = chat(server.url, "/what:x:\n/system \n")
    assert code == 0
    assert "no command /what:x:." in output
    assert "/reset" in output
    assert output.endswith("/system needs the text: /system TEXT\n")


@contextmanager
def one_that_says(stream: bytes) -> Iterator[str]:
    """The URL of a server whose every answer is this, and whose model is m[red]:x:."""

    class Says(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(b'{"data": [{"id": "m[red]:x:"}]}')

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.answer(stream)

        def answer(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Says) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()


def events(*pieces: str) -> bytes:
    chunks = [{"choices": [{"delta": {"content": x}, "finish_reason": None}]} for x in pieces]
    return b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks)


def test_what_a_model_says_is_shown_as_it_is() -> None:
    text = "if x[:x:]:\n\treturn [bold] :heart:\x1b[2J"
    with one_that_says(b": ping\n\n" + events(*text.split(" ")) + b"data: [DONE]\n\n") as url:
        code, output = chat(url, "go on\n")
        assert code == 0
        assert output.splitlines()[0] == "Chatting with m[red]:x:. /help lists commands."
        assert output.partition("\n")[2] == text.replace(" ", "") + "\n"  # pieces have no spaces
        with closing(Terminal(url)) as terminal:
            terminal.wait_for(b"> ")
            terminal.type(b"go on\r")
            terminal.wait_for(b":heart:[2J")  # it clears nothing
            assert terminal.leave() == 0


@pytest.mark.parametrize("more", [b"data: {bad\n\n", b"data: {}\n\n", b"data: [1]\n\n"])
def test_an_answer_that_is_none_ends_on_a_line_of_its_own(more: bytes) -> None:
    with one_that_says(events("half") + more) as url:
        code, output = chat(url, "go on\n")
    assert code == 1
    assert output.splitlines()[1:] == [
        "half",
        f"{url} answers, but not as a Mini-SGLang server does",
    ]


def test_bytes_that_are_no_text_and_a_url_for_other_clients(server: ScriptedServer) -> None:
    before = len(server.received)
    done = subprocess.run(
        [sys.executable, "-m", "minisgl.shell", "--url", f"{server.url}/v1/"],
        input=b"caf\xe9 caf\xc3\xa9\n",
        capture_output=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert said(server.received[before]) == [("user", "caf\ufffd caf\u00e9")]


def test_ctrl_c_while_a_pipe_says_nothing(server: ScriptedServer) -> None:
    shell = subprocess.Popen(
        [sys.executable, "-m", "minisgl.shell", "--url", server.url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert shell.stdout
    assert select.select([shell.stdout], [], [], 30)[0]  # it has greeted
    time.sleep(0.1)  # and waits
    shell.send_signal(signal.SIGINT)
    _, errors = shell.communicate(timeout=10)
    assert (shell.returncode, errors) == (130, b"")


def test_a_connection_that_breaks_takes_its_question_along() -> None:
    asked: list[list[dict[str, str]]] = []

    class HalfAnAnswer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            asked.append(body["messages"])
            chunk = {"choices": [{"delta": {"content": "half"}, "finish_reason": None}]}
            self.send_response(200)
            self.send_header("content-length", "9999")
            self.end_headers()
            self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), HalfAnAnswer) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        with closing(Chat(f"http://127.0.0.1:{http.server_port}")) as talk:
            for question in ("one", "two"):
                with pytest.raises(ChatError, match="there is no server"):
                    list(talk.ask(question))
        http.shutdown()
    assert asked == [[{"role": "user", "content": question}] for question in ("one", "two")]


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://127.0.0.1:19l9", "http://[::1:99"])
def test_no_server(url: str) -> None:
    code, output = chat(url, "hello\n")
    assert code == 1
    assert f"there is no server at {url}" in output
    assert "Traceback" not in output


class Terminal:
    """A pseudo-terminal with the shell in it. Mutable: `wait_for` consumes what it has seen."""

    def __init__(self, url: str) -> None:
        self._ours, theirs = pty.openpty()
        self.shell = subprocess.Popen(
            [sys.executable, "-m", "minisgl.shell", "--url", url],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            # Without a controlling terminal, Ctrl-C would be a character like any other.
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env={**os.environ, "TERM": "dumb", "PROMPT_TOOLKIT_NO_CPR": "1"},
        )
        os.close(theirs)
        self._seen = b""

    def type(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def wait_for(self, text: bytes) -> None:
        deadline = time.monotonic() + 10
        while text not in self._seen:
            ready, _, _ = select.select([self._ours], [], [], deadline - time.monotonic())
            assert ready, f"no {text!r} in {self._seen!r}"
            self._seen += os.read(self._ours, 4096)
        self._seen = self._seen.partition(text)[2]

    def leave(self) -> int:
        """Type Ctrl-D until the shell ends. (One typed while the terminal is switched to raw mode,
        just after the prompt has been printed, is lost.)
        """
        deadline = time.monotonic() + 10
        with suppress(OSError):  # EIO: the shell has closed its side
            while time.monotonic() < deadline:
                self.type(b"\x04")
                while select.select([self._ours], [], [], 0.2)[0]:
                    os.read(self._ours, 4096)
        return self.shell.wait(5)

    def close(self) -> None:
        self.shell.kill()
        self.shell.wait()
        os.close(self._ours)


def test_ctrl_c_stops_the_answer_and_keeps_the_shell(server: ScriptedServer) -> None:
    before = len(server.aborted)
    with closing(Terminal(server.url)) as terminal:
        terminal.wait_for(b"> ")
        terminal.type(b"one !forever\r")
        terminal.wait_for(b"more more")
        terminal.type(b"\x03")
        terminal.wait_for(b"stopped")
        assert len(server.wait_aborted(before + 1)) == before + 1
        terminal.wait_for(b"> ")
        terminal.type(b"two\r")
        terminal.wait_for(b"0 of 1 prompt token cached")
        terminal.wait_for(b"> ")
        turns = said(server.received[-1])
        assert turns[0] == ("user", "one !forever")
        assert turns[1][1].startswith("one more more")
        assert turns[-1] == ("user", "two")
        assert terminal.leave() == 0
