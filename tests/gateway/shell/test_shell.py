"""The chat in the terminal: through pipes and in a pseudo-terminal."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from rich.console import Console

from helpers.scripted_server import ScriptedServer
from helpers.shells import CHAT, Terminal, ask, chat, run, said
from minisgl_gateway.shell.client import Chat, ChatError
from minisgl_gateway.shell.repl import _history


def test_a_piped_chat(server: ScriptedServer) -> None:
    before = len(server.received)
    code, answers, rest = chat(
        server.url,
        "one two\nthree\n\n/system be brief\nfour\n!refuse\nfive\n"
        "/reset\nsix !fail\nseven\n/bye\nno\n",
    )
    assert code == 1  # two were not answered
    assert answers == "one two .\nthree .\nfour .\nfive .\nsix \nseven .\n"
    assert rest.startswith("Chatting with scripted. /help lists commands.\n")
    assert re.search(r"2 tokens; first after \d+ ms, then [\d.]+ tokens/s; 1 of 2 prompt", rest)
    assert "too long The conversation fills the context: /reset starts a new one.\n" in rest
    assert "out of luck\n" in rest
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
    code, answers, rest = chat(server.url, "/what:x:\n/system \n")
    assert (code, answers) == (1, "")
    assert "no command /what:x:." in rest
    assert "/reset" in rest
    assert rest.endswith("/system needs the text: /system TEXT\n")


@contextmanager
def one_that_says(
    stream: bytes, models: bytes = b'{"data": [{"id": "m[red]:x:"}]}', status: int = 200
) -> Iterator[str]:
    """The URL of a server whose every answer is this. models: of GET /v1/models."""

    class Says(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(models)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.answer(stream)

        def answer(self, body: bytes) -> None:
            self.send_response(status)
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
    texts = [json.dumps(chunk, ensure_ascii=False) for chunk in chunks]
    return b"".join(b"data: " + text.encode() + b"\n\n" for text in texts)


def test_the_text_of_a_model_is_shown_unchanged() -> None:
    text = "if x[:x:]:\u2028\n\treturn [bold] :heart:\x1b[2J"
    with one_that_says(b": ping\n\n" + events(*text.split(" ")) + b"data: [DONE]\n\n") as url:
        code, answers, rest = chat(url, "go on\n")
        assert code == 0
        assert rest == "Chatting with m[red]:x:. /help lists commands.\n"
        assert answers == text.replace(" ", "") + "\n"  # pieces have no spaces
        with closing(Terminal(url)) as terminal:
            terminal.wait_for(b"> ")
            terminal.type(b"go on\r")
            terminal.wait_for(b":heart:[2J")  # it clears nothing
            assert terminal.leave() == 0


@pytest.mark.parametrize("more", [b"data: {bad\n\n", b"data: {}\n\n", b"data: [1]\n\n"])
def test_a_failed_answer_ends_with_a_line_feed(more: bytes) -> None:
    with one_that_says(events("half") + more) as url:
        code, answers, rest = chat(url, "go on\n")
    assert (code, answers) == (1, "half\n")
    assert rest.splitlines()[1:] == [f"{url} answers, but not as a Mini-SGLang server does"]


@pytest.mark.parametrize(
    ("status", "models", "says"),
    [
        (404, b'{"error": "no such page"}', "the server answered with HTTP 404"),
        (200, b'{"data": ["m"]}', "answers, but not as a Mini-SGLang server does"),
    ],
)
def test_another_kind_of_server(status: int, models: bytes, says: str) -> None:
    with (
        one_that_says(b"", models, status) as url,
        closing(Chat(url)) as asked,
        pytest.raises(ChatError, match=says),
    ):
        assert not asked.model


def test_invalid_utf8_and_a_url_that_ends_with_v1(server: ScriptedServer) -> None:
    before = len(server.received)
    done = subprocess.run(
        [*CHAT, f"{server.url}/v1/"],
        input=b"caf\xe9 caf\xc3\xa9\n",
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "caf\ufffd caf\u00e9 .\n".encode())
    assert said(server.received[before]) == [("user", "caf\ufffd caf\u00e9")]


def test_ctrl_c_while_a_pipe_is_silent(server: ScriptedServer) -> None:
    shell = subprocess.Popen(
        [*CHAT, server.url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert shell.stderr
    assert b"Chatting" in shell.stderr.readline()
    time.sleep(0.1)  # and waits
    shell.send_signal(signal.SIGINT)
    assert shell.communicate(timeout=60) == (b"", b"")
    assert shell.returncode == 130


def test_a_question_whose_connection_breaks_is_not_kept() -> None:
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
    for code, answers, rest in (chat(url, "hello\n"), ask(url, "hello")):
        assert (code, answers) == (1, "")
        assert rest.startswith(f"there is no server at {url} (")
        assert rest.count("\n") == 1


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


def test_settings_retry_and_messages_of_several_lines(server: ScriptedServer) -> None:
    before = len(server.received)
    code, answers, rest = chat(
        server.url,
        '/set temperature 0.5\n/set stop ";"\none\n/retry\n/set temperature\n"""two\n three"""\n'
        "/reset\n/retry\n/set top_p=7\n/set n 2\n/set echo true\nquit\nno\n",
        "--system", "be brief", "--set", "top_k=3",
    )  # fmt: skip
    assert (code, answers) == (1, "one .\none .\ntwo three .\n")
    first, again, last = server.received[before:]
    assert said(first) == said(again) == [("system", "be brief"), ("user", "one")]
    sampling = first.sampling
    assert (sampling.temperature, sampling.top_k, sampling.stop) == (0.5, 3, (";",))
    assert said(last)[1:] == [("user", "one"), ("assistant", "one ."), ("user", "two\n three")]
    assert last.sampling.temperature == 0.25  # the server's own default
    assert 'Settings: top_k 3, temperature 0.5, stop [";"].\n' in rest
    assert "There is no question yet.\n" in rest
    assert "top_p must be above 0 and at most 1, got 7.0\n" in rest
    assert "there is no setting 'n'; the settings are temperature, " in rest
    assert "there is no setting 'echo'" in rest, "a chat's prompt is on the screen already"


def test_a_loaded_chat_without_a_system_prompt_has_none(tmp_path: Path) -> None:
    saved, again = tmp_path / "saved.json", tmp_path / "again.json"
    with closing(Chat("http://127.0.0.1:9")) as chat:
        chat.save(str(saved))
    with closing(Chat("http://127.0.0.1:9", system="be brief")) as chat:
        chat.load(str(saved))
        chat.save(str(again))
    assert again.read_bytes() == saved.read_bytes()


def test_a_saved_chat_goes_on(server: ScriptedServer, tmp_path: Path) -> None:
    saved = tmp_path / "chat.json"
    code, *_ = chat(server.url, f"/system s\n/set seed 7\none\ntwo\n/save {saved}\n")
    assert code == 0
    body = json.loads(saved.read_text())
    assert body["seed"] == 7
    before = len(server.received)
    code, answers, rest = chat(server.url, f"/load {saved}\nthree\n/retry\n/retry\n")
    assert (code, answers) == (0, "three .\n" * 3)
    assert f"The conversation of {saved}, 2 questions long, goes on.\n" in rest
    turns = [("user", "one"), ("assistant", "one ."), ("user", "two"), ("assistant", "two .")]
    for message in server.received[before:]:
        assert said(message) == [("system", "s"), *turns, ("user", "three")]
        assert message.sampling.seed == 7


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read: No such file"),
        ("{", "is no conversation that /save wrote"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "is no conversation"),
        ('{"messages": [], "temperature": 9}', "temperature must be between 0 and 2"),
        ('{"messages": [], "n": 2}', "there is no setting 'n'"),
    ],
)
def test_a_file_that_is_no_chat(
    server: ScriptedServer, tmp_path: Path, content: str | None, says: str
) -> None:
    path = tmp_path / "x.json"
    if content:
        path.write_text(content)
    code, answers, rest = chat(server.url, f"one\n/load {path}\ntwo\n/save {tmp_path}\n")
    assert (code, answers) == (1, "one .\ntwo .\n")
    assert str(path) in rest
    assert says in rest
    assert f"{tmp_path} cannot be written: Is a directory\n" in rest
    assert len(said(server.received[-1])) == 3  # the chat of before goes on


def test_a_reader_of_stdout_that_leaves(server: ScriptedServer) -> None:
    command = f"{' '.join(CHAT)} {server.url} | true; exit ${{PIPESTATUS[0]}}"
    done = run("bash", "-c", command, text="one\ntwo\n")
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)


def test_a_full_disk_under_stdout(server: ScriptedServer) -> None:
    command = (sys.executable, "-m", "minisgl", "run", "--url", server.url, "one")
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    says = "the answer cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, says)


def test_lines_of_earlier_chats_come_back(server: ScriptedServer, state: Path) -> None:
    with closing(Terminal(server.url)) as terminal:
        terminal.wait_for(b"> ")
        terminal.type(b'"""one\r')
        terminal.wait_for(b"... ")
        terminal.type(b'two"""\r')
        terminal.wait_for(b"cached")
        terminal.type(b"exit\r")
        assert terminal.shell.wait(60) == 0
    assert said(server.received[-1]) == [("user", "one\ntwo")]
    history = state / "minisgl" / "chat_history"
    assert history.stat().st_mode & 0o077 == 0
    with closing(Terminal(server.url)) as terminal:
        terminal.wait_for(b"> ")
        terminal.type(b"\x10\x10\x10\r")  # Ctrl-P: the third line from the end
        terminal.wait_for(b"... ")
        assert terminal.leave() == 0
    assert history.read_text().count('+"""one') == 2


def test_a_history_that_can_no_longer_be_written(state: Path) -> None:
    """As on a full disk: the chat goes on, and remembers its own lines."""
    history = _history(Console())
    path = state / "minisgl" / "chat_history"
    path.unlink()
    path.mkdir()
    history.append_string("one")
    assert history.get_strings() == ["one"]
