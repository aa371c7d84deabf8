"""The command line, made from the fields of `ServerArgs` and of the row `server` of `options`.

A field `max_seq_len` is the flag `--max-seq-len`. Its `Option` says what the flag accepts and what
`--help` prints about it (`minisgl.core.args`).
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Collection, Sequence
from shutil import get_terminal_size
from typing import Any, Final, NoReturn

from minisgl import plugins
from minisgl.core.aliases import FLAGS
from minisgl.core.options import SWITCH, Option, Rule, flag_of, options_of, whole
from minisgl.errors import ConfigError
from minisgl.server.args import ServerArgs, server_options
from minisgl.version import __version__

GROUPS: Final = ("model", "server", "access", "scheduling", "engine", "many devices", "running")
"""The headings of `--help`, in order."""


def parse_args(argv: Sequence[str] | None = None) -> ServerArgs:
    """Return the options of `minisgl serve`.

    Exits with code 2 and a sentence if a flag is wrong; with 0 after --help or --version.
    """
    parser = server_parser("minisgl serve", "Serve a language model over OpenAI's HTTP API.")
    add_model(parser)
    return server_args(parser, parser.parse_all(argv))


def server_parser(prog: str, description: str, *, without: Collection[str] = ()) -> Parser:
    """Return a parser that has a flag for each option of a server, except for those `without`.

    Its namespace holds the flags that were given, and no defaults.
    """
    parser = Parser(
        prog=prog,
        description=description,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=_HelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"minisgl {__version__}")
    for group in GROUPS:
        flags = parser.add_argument_group(group)
        for name, (default, option) in options_of(server_options()).items():
            if option.group == group and name not in without:
                about = _flag(default, option)
                flags.add_argument(flag_of(name), **about)
                for alias in (flag for flag, ours in FLAGS.items() if ours == name):
                    hidden = about | {"dest": name, "help": argparse.SUPPRESS}
                    flags.add_argument(alias, **hidden)
    return parser


def add_model(parser: Parser) -> None:
    """Add the argument MODEL, a synonym of --model."""
    parser.add_argument("words", metavar="MODEL", nargs="?", help="the same as --model MODEL")


def server_args(parser: Parser, given: dict[str, Any]) -> ServerArgs:
    """Return the options that `Parser.parse_all` found. Exits with code 2 if they are wrong.

    given: the function takes out `words`, which is the MODEL.
    """
    word = given.pop("words", None)
    if word is not None:
        if "model" in given:
            parser.error(f"MODEL is given twice: {word} and --model {given['model']}")
        given["model"] = word
    try:
        args = server_options()(**given)
    except ConfigError as error:
        parser.error(str(error))
    if wrong := args.conflict():
        parser.error(wrong)
    return args


def _flag(default: Any, option: Option) -> dict[str, Any]:
    """Return the arguments of `add_argument` for an option."""
    if option.rule is SWITCH:
        return {"action": "store_true", "help": option.help}
    shown = option.unset if default is None else default
    flag: dict[str, Any] = {"help": f"{option.help} (default: {shown})"}
    if option.rule.choices:
        return flag | {"choices": option.rule.choices}
    metavar = option.metavar or option.rule.metavar
    flag |= {"type": flag_type(option.rule), "metavar": metavar}
    return flag | {"action": "extend"} if option.repeats else flag


def flag_type(rule: Rule) -> Callable[[str], Any]:
    """Return the function that argparse calls with a flag's text."""

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
    """Return the type of a flag that is a whole number from `low` to `high`."""
    return flag_type(whole(low, high))


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one sentence that names the flag that was probably meant."""

    def parse_all(self, argv: Sequence[str] | None) -> dict[str, Any]:
        """Return the flags and positional arguments, which may come in any order.

        Exits with code 2 and a sentence if one is unknown, or else if one is missing.
        """
        must = [action for action in self._actions if action.required and action.nargs != "*"]
        self.usage = self.format_usage().removeprefix("usage: ")  # while these are required
        for action in must:
            action.required = False  # argparse would name them first
        given, rest = self.parse_known_intermixed_args(argv)
        if unknown := [word for word in rest if word.startswith("-")]:
            self.error("; ".join(self._answer(word.partition("=")[0]) for word in unknown))
        if rest:
            model = vars(given).get("words")
            hint = f"; MODEL is {model} (of a GGUF file in parts, name one)" if model else ""
            self.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
        if left := [(*a.option_strings, a.metavar)[0] for a in must if not getattr(given, a.dest)]:
            self.error(f"the following arguments are required: {', '.join(map(str, left))}")
        return vars(given)

    def error(self, message: str) -> NoReturn:
        """Print one sentence, not the whole usage, and exit with code 2."""
        self.exit(2, f"{self.prog}: {message}\n(see {self.prog} --help)\n")

    def _answer(self, flag: str) -> str:
        """Return a sentence about an unknown flag, with the flag that was probably meant."""
        ours = [option for option in self._option_string_actions if option.startswith("--")]
        near = difflib.get_close_matches(flag, ours, n=1, cutoff=0.75)
        known: Callable[[str], str] | None = plugins.find("flag_hints", "other_engines")
        hint = (known and known(flag)) or (f"did you mean {near[0]}?" if near else "")
        if plugins.lacks("options"):
            hint += f" if it is a flag of minisgl, it {plugins.absent('options')}"
        return f"unrecognized arguments: {flag}" + (f"; {hint.strip()}" if hint else "")


class _HelpFormatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, 2, 30, min(96, get_terminal_size((98, 24)).columns - 2))
