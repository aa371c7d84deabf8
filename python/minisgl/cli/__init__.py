"""The command line: `minisgl COMMAND ...`, also as `python -m minisgl COMMAND ...`.

The commands are the rows of the table `commands`. A row's object is called with the arguments after
the command and the process's start; it returns the exit code. Its module is imported when it runs.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from minisgl import plugins
from minisgl.errors import ConfigError
from minisgl.version import __version__

HELP: Final = """\
usage: minisgl COMMAND ...

{commands}

MODEL is a folder, a .gguf file or an id such as Qwen/Qwen3-0.6B; without it, a
small built-in model runs. `minisgl COMMAND --help` lists a command's flags.
"""


class Command(Protocol):
    """A command. argv: what follows its name. began: the process's start, on `time.monotonic`."""

    def __call__(self, argv: Sequence[str], began: float) -> int: ...


def run_command(argv: Sequence[str], began: float) -> int:
    """Run the command and return the exit code. began: the process's start, on `time.monotonic`."""
    command, *rest = argv or ["serve"]
    if command == "help" and rest:
        command, rest = rest[0], ["--help"]
    if command in ("--version", "version"):
        print(f"minisgl {__version__}")
        return 0
    try:
        plugins.installed()
    except ConfigError as error:
        print(f"minisgl: {error}", file=sys.stderr)
        return 2
    if command in ("-h", "--help", "help"):
        print(help_text(), end="")
        return 0
    if command.startswith("-"):
        command, rest = "serve", list(argv)
    found: Command | None = plugins.find("commands", command)
    if found is None:
        print(f"minisgl: there is no command {command!r}; {_hint(command)}", file=sys.stderr)
        return 2
    return found(rest, began)


def help_text() -> str:
    """Return what `minisgl --help` prints. A row's `about` has the arguments, two spaces, and what
    the command does."""
    lines = []
    for row in plugins.rows("commands"):
        arguments, _, does = row.about.partition("  ")
        lines.append(f"  {f'{row.name} {arguments}':<25}{does}")
    return HELP.format(commands="\n".join(lines))


def _hint(command: str) -> str:
    known: Callable[[str], str] | None = plugins.find("flag_hints", "other_commands")
    if known and (hint := known(command)):
        return hint
    names = [row.name for row in plugins.rows("commands")]
    if near := difflib.get_close_matches(command, names, n=1):
        return f"did you mean minisgl {near[0]}?"
    if "/" in command:
        return f"minisgl serve {command} serves it"
    has_chat = plugins.row_of("commands", "chat")
    more = "" if has_chat else f"; another one {plugins.absent('commands')}"
    return f"the commands are {', '.join(names)}{more}"
