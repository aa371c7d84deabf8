"""minisgl run, and a proxy's environment variables."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from helpers.scripted_server import ScriptedServer
from helpers.shells import ask, chat, here, said


def test_one_question(server: ScriptedServer) -> None:
    before = len(server.received)
    code, answer, rest = ask(server.url, "one two", "--set", "max_tokens=1", "--system", "s")
    assert (code, answer) == (0, "one \n")
    assert re.fullmatch(r"1 token, cut off by the length limit; first after .*\n", rest)
    assert ask(server.url, "sum", "up:", text="a\nb\n")[:2] == (0, "sum up: a b .\n")
    assert ask(server.url, text="piped\n")[:2] == (0, "piped .\n")
    assert [said(message)[-1][1] for message in server.received[before:]] == [
        "one two",
        "sum up:\n\na\nb",
        "piped",
    ]
    assert ask(server.url, "half !fail") == (1, "half \n", "out of luck\n")
    assert ask(server.url, "!refuse") == (1, "", "too long\n")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "there is no question"),
        (["--set", "temperature", "x"], "must be NAME=VALUE, got 'temperature'"),
        (["--set", "temperature=3", "x"], "temperature must be between 0 and 2, got 3.0"),
        (["--dtype", "float32", "x"], "--url names a server that runs already: leave out --dtype"),
        (["--dry-run", "x"], "unrecognized arguments: --dry-run"),
    ],
)
def test_a_question_that_cannot_be_asked(
    server: ScriptedServer, words: list[str], says: str
) -> None:
    code, answer, rest = ask(server.url, *words)
    assert (code, answer) == (2, "")
    assert says in rest
    assert rest.count("\n") == 2


def test_a_question_of_one_word_is_the_model() -> None:
    code, answer, rest = here("run", "hello")
    assert (code, answer) == (2, "")
    assert "hello is the MODEL, and there is no question: give one" in rest


PROXIES = dict.fromkeys(("http_proxy", "HTTP_PROXY", "all_proxy"), "http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("say", "env"), [(chat, PROXIES), (ask, {"ALL_PROXY": "socks5://127.0.0.1:9"})]
)
def test_a_proxy_is_not_for_this_machine(
    server: ScriptedServer, say: Callable[..., tuple[int, str, str]], env: dict[str, str]
) -> None:
    address = server.url.removeprefix("http://")  # without a scheme, too
    port = address.partition(":")[2]
    for url in (server.url, address, f"localhost:{port}"):
        assert say(url, "one", **env)[:2] == (0, "one .\n")


def test_a_proxy_that_needs_a_package() -> None:
    code, _, rest = chat("http://192.0.2.1", "one\n", ALL_PROXY="socks5://127.0.0.1:9")
    assert code == 1
    assert rest.startswith("a proxy variable of the environment cannot be used (")
    assert rest.endswith("or unset ALL_PROXY, HTTPS_PROXY and HTTP_PROXY\n")
