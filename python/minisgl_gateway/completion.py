"""`minisgl completion SHELL`: prints a script that completes commands, flags and their values.

It is made from the parsers of the commands, so it has every flag. The script runs no Python.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

PATHS: Final = ("FILE", "DIR")
"""Metavars of values that are paths."""


HOW: Final = """\
bash  source <(minisgl completion bash)                           (a line for ~/.bashrc)
zsh   source <(minisgl completion zsh)                            (a line for ~/.zshrc)
fish  minisgl completion fish > ~/.config/fish/completions/minisgl.fish
"""


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag. values: its choices; None for a switch, () for any text. is_path: whether the value
    is a path."""

    name: str
    help: str
    values: tuple[str, ...] | None
    is_path: bool = False


@dataclass(frozen=True, slots=True)
class CompletedCommand:
    """A command. words: the words that may follow it; without any, names of files may."""

    name: str
    help: str
    flags: tuple[Flag, ...] = ()
    words: tuple[str, ...] = ()

    @classmethod
    def of(cls, name: str, about: str, parser: argparse.ArgumentParser) -> Self:
        flags = []
        for action in parser._actions:
            long = [option for option in action.option_strings if option.startswith("--")]
            if not long:
                continue
            values = None if action.nargs == 0 else tuple(map(str, action.choices or ()))
            text = "" if action.help in (None, argparse.SUPPRESS) else str(action.help)
            is_path = action.metavar in PATHS or long[-1] == "--model"
            flags.append(Flag(long[-1], _sentence(text), values, is_path))
        return cls(name, about, tuple(flags))


def print_script(argv: Sequence[str], commands: list[CompletedCommand]) -> int:
    """Print the script for the shell that `argv` names. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="minisgl completion",
        description="Print a script with which a shell completes commands and flags.",
        epilog=HOW,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=sorted(SHELLS))
    print(SHELLS[parser.parse_args(argv).shell](commands), end="")
    return 0


def _sentence(text: str) -> str:
    """Return the first clause of a flag's help text."""
    return " ".join(text.replace("%%", "%").partition(" (default")[0].partition(";")[0].split())


def bash(commands: list[CompletedCommand]) -> str:
    by_flag = _values(commands)
    cases = [
        f"    {flag.name}) COMPREPLY=($({_bash_values(flag)})); return ;;"
        for flag in by_flag.values()
    ]
    words = [
        f"    {command.name}) flags='{_names(command)}' words='{' '.join(command.words)}' ;;"
        for command in commands
    ]
    names = " ".join(command.name for command in commands)
    return "\n".join(
        [
            "_minisgl() {",
            "  local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]}",
            "  local flags='' words=''",
            "  compopt -o filenames 2>/dev/null",
            "  if [ $COMP_CWORD = 1 ] && [[ $cur != -* ]]; then",
            f"    COMPREPLY=($(compgen -W '{names}' -- \"$cur\")); return",
            "  fi",
            '  case "$prev" in',
            *cases,
            "  esac",
            '  case "${COMP_WORDS[1]}" in',
            *words,
            "    -*) flags='" + _names(commands[0]) + "' ;;",
            "  esac",
            "  if [[ $cur == -* ]]; then",
            '    COMPREPLY=($(compgen -W "$flags" -- "$cur"))',
            '  elif [ -n "$words" ]; then',
            '    COMPREPLY=($(compgen -W "$words" -- "$cur"))',
            "  else",
            '    COMPREPLY=($(compgen -f -- "$cur"))',
            "  fi",
            "}",
            "complete -F _minisgl minisgl",
            "",
        ]
    )


def _bash_values(flag: Flag) -> str:
    if flag.is_path:
        return 'compgen -f -- "$cur"'
    return f"compgen -W '{' '.join(flag.values or ())}' -- \"$cur\""


def _names(command: CompletedCommand) -> str:
    return " ".join(flag.name for flag in command.flags)


def _values(commands: list[CompletedCommand]) -> Mapping[str, Flag]:
    """Return the flags that take a value, by name."""
    return {
        flag.name: flag for command in commands for flag in command.flags if flag.values is not None
    }


def zsh(commands: list[CompletedCommand]) -> str:
    lines = ["#compdef minisgl", "_minisgl() {", "  local -a commands=("]
    lines += [f"    {_quoted(f'{command.name}:{command.help}')}" for command in commands]
    lines += [
        "  )",
        "  if (( CURRENT == 2 )) && [[ $PREFIX != -* ]]; then",
        "    _describe command commands; return",
        "  fi",
        "  local command=$words[2]",
        "  if [[ $command != -* ]]; then shift words; (( CURRENT-- )); fi",
        "  case $command in",
    ]
    for command in commands:
        pattern = f"{command.name}|-*" if command is commands[0] else command.name
        lines += [f"    {pattern}) _arguments \\"]
        lines += [f"      {_zsh_flag(flag)} \\" for flag in command.flags]
        rest = f"({' '.join(command.words)})" if command.words else "_files"
        lines += [f"      '*:argument:{rest}' ;;"]
    lines += [
        "  esac",
        "}",
        'if [ "$funcstack[1]" = _minisgl ]; then _minisgl "$@"; else compdef _minisgl minisgl; fi',
        "",
    ]
    return "\n".join(lines)


def _zsh_flag(flag: Flag) -> str:
    help_ = "".join(f"\\{char}" if char in "[]:\\" else char for char in flag.help)
    if flag.values is None:
        return _quoted(f"{flag.name}[{help_}]")
    values = "_files" if flag.is_path else f"({' '.join(flag.values)})" if flag.values else " "
    return _quoted(f"{flag.name}=[{help_}]:value:{values}")


def fish(commands: list[CompletedCommand]) -> str:
    names = " ".join(command.name for command in commands)
    lines = []
    for command in commands:
        first = f"not __fish_seen_subcommand_from {names}"
        lines.append(
            f"complete -c minisgl -f -n {_quoted(first)} -a {command.name} "
            f"-d {_quoted(command.help)}"
        )
        seen = f"__fish_seen_subcommand_from {command.name}"
        if command.words:
            lines.append(
                f"complete -c minisgl -f -n {_quoted(seen)} -a {_quoted(' '.join(command.words))}"
            )
        for flag in command.flags:
            takes = "" if flag.values is None else " -r" if flag.is_path else " -x"
            values = f" -a {_quoted(' '.join(flag.values))}" if flag.values else ""
            lines.append(
                f"complete -c minisgl -n {_quoted(seen)} -l {flag.name[2:]}{takes}{values} "
                f"-d {_quoted(flag.help)}"
            )
    return "\n".join([*lines, ""])


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "’") + "'"


SHELLS: Final[Mapping[str, Callable[[list[CompletedCommand]], str]]] = {
    "bash": bash,
    "zsh": zsh,
    "fish": fish,
}
