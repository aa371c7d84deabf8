"""`minisgl chat` and `minisgl run`: clients, which start a server of their own without `--url`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from minisgl import plugins
from minisgl.core.options import flag_of
from minisgl.errors import MinisglError
from minisgl.server.args import ServerArgs
from minisgl.server.flags import Parser, add_model, server_args, server_parser
from minisgl_gateway import env
from minisgl_gateway.shell.client import Chat
from minisgl_gateway.shell.repl import run_question, run_shell
from minisgl_gateway.shell.settings import Settings

NOT_OF_A_CHAT: Final = (
    "shell", "dry_run", "api_key", "api_key_file", "ssl_certfile", "ssl_keyfile", "dp",
)  # fmt: skip
"""Options of `serve` that `chat` and `run` do not have, or that have another meaning there."""

Client = Callable[[str], int]
"""Talks to the server at a URL. Returns the exit code."""


def client_parser(command: str) -> Parser:
    """Return the parser of `minisgl chat` or `minisgl run`."""
    does = {"chat": "Chat with a model in this terminal.", "run": "Print one answer, and end."}
    parser = server_parser(f"minisgl {command}", does[command], without=NOT_OF_A_CHAT)
    if command == "chat":
        add_model(parser)
    else:
        parser.add_argument(
            "words", metavar="MODEL | QUESTION", nargs="*",
            help="the model, then the question. A first word that contains spaces is the question. "
            "A pipe is read as well, and comes after the question",
        )  # fmt: skip
    group = parser.add_argument_group(command)
    group.add_argument("--url", help="ask the server that runs there, and start none")
    group.add_argument("--api-key", metavar="KEY", help="the key for the server at --url")
    group.add_argument("--system", metavar="TEXT", help="the system prompt (default: none)")
    group.add_argument(
        "--set", action="append", type=_setting, metavar="NAME=VALUE",
        help="a sampling setting, such as temperature=0.2 or max_tokens=100; may be repeated "
        "(default: what the checkpoint recommends)",
    )  # fmt: skip
    return parser


def chat_client(about: dict[str, Any]) -> Client:
    """Return a client that chats. about: the given flags of `chat`. Raises InvalidSampling."""
    begin = _chats(about, [*env.shell_settings(), *(about.get("set") or ())])
    return lambda url: run_shell(partial(begin, url))


def _chats(about: dict[str, Any], settings: Sequence[tuple[str, str]]) -> Callable[[str], Chat]:
    """Return a function that makes a conversation with the server at a URL."""
    system, key = about.get("system"), about.get("api_key")
    return partial(Chat, system=system, settings=Settings(settings), api_key=key)


def serve_with_shell(args: ServerArgs, began: float) -> int:
    """Serve beside a chat: `minisgl serve --shell`. Returns the exit code."""
    return _serve_beside(args, chat_client({}), began)


def _serve_beside(args: ServerArgs, client: Client, began: float) -> int:
    """Start a server, and run `client` beside it. A client with `--url` never imports a server."""
    launch: Callable[..., int] = plugins.need("servers", "own", "a server")
    return launch(args, foreground=client, began=began)


def _until_ctrl_c(command: str, argv: Sequence[str], began: float) -> int:
    """Run the command, and return the exit code."""
    try:
        return _run_client(command, argv, began)
    except KeyboardInterrupt:
        return 130


chat = partial(_until_ctrl_c, "chat")
run = partial(_until_ctrl_c, "run")


def _run_client(command: str, argv: Sequence[str], began: float) -> int:
    parser = client_parser(command)
    given = parser.parse_all(argv)
    about = {name: given.pop(name, None) for name in ("url", "api_key", "system", "set")}
    try:
        client = chat_client(about) if command == "chat" else _question(about, given, parser)
    except MinisglError as error:
        parser.error(str(error))
    if about["api_key"] and about["url"] is None:
        parser.error("--api-key is for the server at --url")
    if about["url"] is None:
        return _serve_beside(server_args(parser, given | {"shell": True}), client, began)
    if given:
        flag = "MODEL" if "words" in given else flag_of(next(iter(given)))
        parser.error(f"--url names a server that runs already: leave out {flag}")
    return client(about["url"])


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, got {text!r}")
    return name, value


def _question(about: dict[str, Any], given: dict[str, Any], parser: Parser) -> Client:
    """Return a client that asks one question. Takes the question out of given["words"].

    Raises InvalidSampling.
    """
    begin = _chats(about, about["set"] or ())
    words = given.pop("words", [])
    has_model = "model" in given or about["url"] is not None
    if words and not has_model and not any(char.isspace() for char in words[0]):
        given["model"], *words = words
    piped = "" if os.isatty(0) else sys.stdin.buffer.read().decode("utf-8", "replace")
    question = "\n\n".join(filter(str.strip, (" ".join(words), piped.strip("\n"))))
    if not question:
        but = f"{given['model']} is the MODEL, and " if "model" in given else ""
        parser.error(f"{but}there is no question: give one, or send one through a pipe")
    return lambda url: run_question(partial(begin, url), question)
