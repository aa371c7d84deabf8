"""The command line, made from the fields of `ServerArgs`.

A field `max_seq_len` is the flag `--max-seq-len`. Its `Option` says what the flag accepts and what
`--help` says of it (`minisgl.core.args`).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn

from minisgl import __version__
from minisgl.core.args import SWITCH, Option, Rule, options_of, whole
from minisgl.errors import ConfigError
from minisgl.server.args import ServerArgs, conflict

GROUPS: Final = ("model", "server", "scheduling", "engine", "many devices", "running")
"""The headings of `--help`, in order."""


def parse_args(argv: Sequence[str] | None = None) -> ServerArgs:
    """Exit with code 2 and a sentence if a flag is wrong; with 0 after --help or --version."""
    parser = _Parser(
        prog="python -m minisgl",
        description="Serve a language model over OpenAI's HTTP API.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=_HelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"minisgl {__version__}")
    for group in GROUPS:
        flags = parser.add_argument_group(group)
        for name, (default, option) in options_of(ServerArgs).items():
            if option.group == group:
                flags.add_argument(f"--{name.replace('_', '-')}", **_flag(default, option))
    try:
        args = ServerArgs(**vars(parser.parse_args(argv)))
    except ConfigError as error:
        parser.error(str(error))
    if wrong := conflict(args):
        parser.error(wrong)
    return args


def _flag(default: Any, option: Option) -> dict[str, Any]:
    """The arguments of `add_argument`."""
    if option.rule is SWITCH:
        return {"action": "store_true", "help": option.help}
    shown = option.unset if default is None else default
    flag: dict[str, Any] = {"help": f"{option.help} (default: {shown})"}
    if option.rule.choices:
        return flag | {"choices": option.rule.choices}
    return flag | {"type": _type(option.rule), "metavar": option.metavar or option.rule.metavar}


def _type(rule: Rule) -> Callable[[str], Any]:
    """What argparse calls with a flag's text."""

    def parse(text: str) -> Any:
        try:
            value = rule.parse(text)
        except ValueError:
            value = None
        if value is None or not rule.accepts(value):
            raise argparse.ArgumentTypeError(f"must be {rule.words}, got {text!r}")
        return value

    return parse


def integer(low: int, high: int | None = None) -> Callable[[str], int]:
    """The type of a flag that is a whole number from `low` to `high`."""
    return _type(whole(low, high))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Print one sentence instead of the whole usage, and exit with code 2."""
        self.exit(2, f"{self.prog}: {message}\n(see {self.prog} --help)\n")


class _HelpFormatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=96)
