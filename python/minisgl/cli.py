"""The command line: `minisgl COMMAND ...`, also as `python -m minisgl COMMAND ...`.

`HELP` lists the commands. `chat` and `run` are clients: without `--url` they start a server of
their own on a free port. Modules are imported by the command that needs them.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from minisgl import env
from minisgl.version import __version__

if TYPE_CHECKING:
    from minisgl.server.args import ServerArgs
    from minisgl.server.flags import Parser
    from minisgl_gateway.completion import CompletedCommand

COMMANDS: Final = (
    "serve", "chat", "run", "pull", "list", "rm", "bench", "replay", "route", "selfcheck",
    "completion",
)  # fmt: skip

ELSEWHERE: Final = {
    "ps": "a server is a process of its own, without a daemon: `pgrep -af minisgl` finds those of "
    "this machine, and GET /v1/models of a server's address says what it serves",
    "stop": "Ctrl-C in its terminal, or SIGTERM, stops a server",
    "ls": "minisgl list shows the models that are downloaded",
    "show": "GET /v1/models and POST /api/show of a running server describe its model",
}
"""Commands of Ollama that are not here -> what to do instead."""

HELP: Final = """\
usage: minisgl COMMAND ...

  serve [MODEL]            serve a model over OpenAI's HTTP API (no command means serve)
  chat [MODEL]             chat with a model in this terminal
  run [MODEL] [QUESTION]   print one answer; a pipe can ask, too
  pull MODEL               download a model: ORG/REPO, or ORG/REPO:Q4_K_M for a GGUF file
  list                     show the models that are downloaded
  rm MODEL                 remove one of them
  bench [NAME]             measure a server or a model
  replay FILE              send a server what `--record FILE` kept, or plan it again
  route --replica URL ...  one address for several servers: requests go by prefix and load
  selfcheck [MODEL]        check that answers do not depend on batch, cache or scheduling
  completion SHELL         print what lets bash, zsh or fish complete commands and flags

MODEL is a checkpoint folder or a model id such as Qwen/Qwen3-0.6B; without it, the built-in model
runs, a small one that needs no download. `minisgl COMMAND --help` lists the flags of a command.
"""

NOT_OF_A_CHAT: Final = (
    "shell", "dry_run", "api_key", "api_key_file", "ssl_certfile", "ssl_keyfile", "dp",
)  # fmt: skip
"""Options of `serve` that `chat` and `run` do not have, or that have another meaning there."""


def run_command(argv: Sequence[str], began: float) -> int:
    """Run the command and return the exit code. began: the process's start, on `time.monotonic`."""
    command, *rest = argv or ["serve"]
    if command in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0
    if command in ("--version", "version"):
        print(f"minisgl {__version__}")
        return 0
    if command.startswith("-"):
        command, rest = "serve", list(argv)
    if command in ("bench", "replay"):
        from minisgl_bench.run import main

        return main(rest if command == "bench" else [command, *rest])
    if command == "route":
        from minisgl_gateway.router.serve import route

        return route(rest)
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f"did you mean minisgl {near[0]}?" if near else f"minisgl serve {command} serves it"
        hint = hint if near or "/" in command else f"the commands are {', '.join(COMMANDS)}"
        hint = ELSEWHERE.get(command, hint)
        print(f"minisgl: there is no command {command!r}; {hint}", file=sys.stderr)
        return 2
    if command == "serve":
        from minisgl.server.flags import parse_args

        args = parse_args(rest)
        return _own_server(args, _chat({}), began) if args.shell else _serve(args, began)
    if command == "selfcheck":
        return _selfcheck(rest)
    if command in ("pull", "list", "rm"):
        from minisgl_gateway.downloads import manage_models

        return manage_models(command, rest)
    if command == "completion":
        from minisgl_gateway.completion import print_script

        return print_script(rest, completed())
    try:
        return _chat_or_run(command, rest, began)
    except KeyboardInterrupt:
        return 130


def _serve(args: ServerArgs, began: float) -> int:
    if args.dp > 1:
        from minisgl_gateway.deploy.local import serve_replicas

        return serve_replicas(args)
    from minisgl.server.launch import launch_server

    return launch_server(args, began=began)


def selfcheck_parser() -> Parser:
    """Return the parser of `minisgl selfcheck`."""
    from minisgl.core.args import EngineArgs, options_of
    from minisgl.server.args import ServerArgs
    from minisgl.server.flags import add_model, server_parser

    others = options_of(ServerArgs).keys() - options_of(EngineArgs).keys()
    about = "Check that a request has the same answer whatever happens around it."
    parser = server_parser("minisgl selfcheck", about, without=others)
    add_model(parser)
    return parser


def _selfcheck(argv: Sequence[str]) -> int:
    from minisgl.errors import ConfigError, EngineError
    from minisgl.server.flags import server_args

    parser = selfcheck_parser()
    args = server_args(parser, parser.parse_all(argv))
    try:
        from minisgl_bench.selfcheck import run_selfcheck

        return run_selfcheck(args)
    except (ConfigError, EngineError) as error:
        print(f"minisgl selfcheck: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def completed() -> list[CompletedCommand]:
    """Return the commands with their flags, for `minisgl completion`."""
    from minisgl.server.flags import server_parser
    from minisgl_bench.run import benchmarks
    from minisgl_gateway.completion import SHELLS, CompletedCommand
    from minisgl_gateway.downloads import ABOUT
    from minisgl_gateway.router.serve import route_parser

    command = CompletedCommand.of
    return [
        command("serve", "serve a model over HTTP", server_parser("minisgl serve", "")),
        command("chat", "chat in this terminal", client_parser("chat")),
        command("run", "print one answer", client_parser("run")),
        *(CompletedCommand(name, about) for name, about in ABOUT.items()),
        CompletedCommand("bench", "measure a server or a model", words=tuple(benchmarks())),
        CompletedCommand("replay", "send a server what was recorded"),
        command("route", "one address for several servers", route_parser()),
        command("selfcheck", "check that answers are stable", selfcheck_parser()),
        CompletedCommand("completion", "print a script for a shell", words=tuple(SHELLS)),
    ]


def _own_server(args: ServerArgs, client: Callable[[str], int], began: float) -> int:
    from minisgl.server.launch import launch_server

    return launch_server(args, foreground=client, began=began)


def client_parser(command: str) -> Parser:
    """Return the parser of `minisgl chat` or `minisgl run`."""
    from minisgl.server.flags import add_model, server_parser

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
    group.add_argument(
        "--url", help="ask the server that runs there, instead of one started for this command"
    )
    group.add_argument("--api-key", metavar="KEY", help="the key for the server at --url")
    group.add_argument("--system", metavar="TEXT", help="the system prompt (default: none)")
    group.add_argument(
        "--set", action="append", type=_setting, metavar="NAME=VALUE",
        help="a sampling setting, such as temperature=0.2 or max_tokens=100; may be repeated "
        "(default: what the checkpoint recommends)",
    )  # fmt: skip
    return parser


def _chat_or_run(command: str, argv: Sequence[str], began: float) -> int:
    from minisgl.errors import MinisglError
    from minisgl.runtime.args import flag_of
    from minisgl.server.flags import server_args

    parser = client_parser(command)
    given = parser.parse_all(argv)
    about = {name: given.pop(name, None) for name in ("url", "api_key", "system", "set")}
    try:
        client = _chat(about) if command == "chat" else _run(about, given, parser)
    except MinisglError as error:
        parser.error(str(error))
    if about["api_key"] and about["url"] is None:
        parser.error("--api-key is for the server at --url")
    if about["url"] is None:
        return _own_server(server_args(parser, given | {"shell": True}), client, began)
    if given:
        flag = "MODEL" if "words" in given else flag_of(next(iter(given)))
        parser.error(f"--url names a server that runs already: leave out {flag}")
    return client(about["url"])


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, got {text!r}")
    return name, value


def _chat(about: dict[str, Any]) -> Callable[[str], int]:
    """Return a function that chats with the server at a URL. Raises InvalidSampling."""
    from minisgl.shell import Settings, run_shell

    settings = Settings([*env.shell_settings(), *(about.get("set") or ())])
    system, key = about.get("system"), about.get("api_key")
    return lambda url: run_shell(url, system=system, settings=settings, api_key=key)


def _run(about: dict[str, Any], given: dict[str, Any], parser: Parser) -> Callable[[str], int]:
    """Return a function that asks the server at a URL. Takes the question out of given["words"].

    Raises InvalidSampling.
    """
    from minisgl.shell import Settings, run_question

    settings = Settings(about["set"] or ())
    words = given.pop("words", [])
    has_model = "model" in given or about["url"] is not None
    if words and not has_model and not any(char.isspace() for char in words[0]):
        given["model"], *words = words
    piped = "" if os.isatty(0) else sys.stdin.buffer.read().decode("utf-8", "replace")
    question = "\n\n".join(filter(str.strip, (" ".join(words), piped.strip("\n"))))
    if not question:
        parser.error("there is no question: give one, or send one through a pipe")
    system, key = about["system"], about["api_key"]
    return lambda url: run_question(url, question, system=system, settings=settings, api_key=key)
