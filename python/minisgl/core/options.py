"""What an option is: a rule for its values, words for `--help`, and a dataclass field with both."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Final, get_args

from minisgl import plugins
from minisgl.errors import ConfigError
from minisgl.utils.text import brief


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The values that an option may have.

    words: completes the sentence "NAME must be ...". accepts: returns whether a value is allowed.
    parse: makes a value of a flag's text; raises ValueError. choices: the allowed values, if they
    are few. metavar: the value's name in `--help`; None for the flag's name.
    """

    words: str
    accepts: Callable[[Any], bool]
    parse: Callable[[str], Any] = str
    choices: tuple[str, ...] = ()
    metavar: str | None = None


def whole(low: int, high: int | None = None) -> Rule:
    """Return the rule for a whole number from `low` to `high`; None is no upper bound."""

    def accepts(value: Any) -> bool:
        is_whole = isinstance(value, Integral) and not isinstance(value, bool)
        return is_whole and low <= value and (high is None or value <= high)

    bounds = f"of at least {low}" if high is None else f"from {low} to {high}"
    return Rule(words=f"a whole number {bounds}", accepts=accepts, parse=int, metavar="N")


def one_of(literal: Any) -> Rule:
    """Return the rule for one of the texts of a `Literal` type."""
    choices = get_args(literal)
    return Rule(words=f"one of {', '.join(choices)}", accepts=choices.__contains__, choices=choices)


def row_of(table: str) -> Rule:
    """Return the rule for the name of a row of this table (`minisgl.plugins`)."""
    choices = tuple(row.name for row in plugins.rows(table))
    words = f"one of {', '.join(choices)}" if choices else f"left out: it {plugins.absent(table)}"
    return Rule(words=words, accepts=choices.__contains__, choices=choices)


def text(words: str, accepts: Callable[[str], bool] = lambda text: True) -> Rule:
    """Return the rule for a text that `accepts` allows."""
    return Rule(words=words, accepts=lambda value: isinstance(value, str) and accepts(value))


SWITCH: Final = Rule(words="True or False", accepts=lambda value: isinstance(value, bool))


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """The description of an option, in addition to its name, type and default.

    group: the heading in `--help`. help: one phrase, without the default. unset: the words for a
    default of None. metavar: instead of the rule's. repeats: a value is a list, and the flag may
    be given several times.
    """

    rule: Rule
    group: str
    help: str
    unset: str = "none"
    metavar: str | None = None
    repeats: bool = False


def option(default: Any, rule: Rule, group: str, help: str, **more: Any) -> Any:
    """Return a dataclass field that carries an `Option`. more: its optional fields."""
    about = Option(rule=rule, group=group, help=help, **more)
    return dataclasses.field(default=default, metadata={"option": about})


def options_of(args: type[Any]) -> dict[str, tuple[Any, Option]]:
    """Return the default and the `Option` of each field that has one, by name."""
    fields = dataclasses.fields(args)
    return {f.name: (f.default, f.metadata["option"]) for f in fields if "option" in f.metadata}


def flag_of(name: str) -> str:
    """Return the flag of the option `name`."""
    return f"--{name.replace('_', '-')}"


def check_option(name: str, value: Any, rule: Rule) -> None:
    """Raise ConfigError unless `rule` accepts the value of the option `name`."""
    if not rule.accepts(value):
        raise ConfigError(f"{name} must be {rule.words}, got {brief(value)}")
