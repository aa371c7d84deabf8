"""Rules from the names of modules to formats, and typed access to the JSON that states them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from minisgl.errors import ConfigError
from minisgl.quantization.parameter import TensorOwner
from minisgl.quantization.weight import PLAIN, Format, Formats, Target
from minisgl_zoo.weights.quantised import log_kernels

SUPPORTED = (
    "fp8 (a scale for each matrix, row or block), int8, int4 (compressed-tensors, AWQ, GPTQ, "
    "AutoRound), MXFP4 and NVFP4 weights; docs/quantization.md has the list"
)

ROUTERS: Final = re.compile(r"\.(gate|router|router\.proj|router\.layer|shared_expert_gate)$")
PERHAPS_PLAIN: Final = re.compile(rf"{ROUTERS.pattern}|\.eh_proj$|^mtp\.")
"""Files need not list these as plain: of multi-token prediction DeepSeek-V3's do not list the
projection, and of Qwen3.5 and Qwen3.6 many do not list any."""
QUANTISED: Final = (".weight_scale", ".weight_scale_inv", ".weight_packed", ".qweight")
"""Ends of tensors' names that only quantised weights have."""

Aliases = Callable[[str], Sequence[str]]
"""From a module to its own name and its names in files."""
Matches = Callable[[str, Target], bool]
"""(module, class) -> whether a rule applies to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The modules that `matches` accepts have this format; with `others`, those that it does not
    accept."""

    matches: Matches
    format: Format
    others: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfiguredFormats(Formats):
    """A module has the format of the first rule that applies to it. Without such a rule it is
    plain. Routers are plain whatever the rules say, unless the files have them quantised:
    DeepSeek-V3's config lists no plain module, and its routers are.

    aliases: module -> its own name and its names in files; a rule may match any of them.
    quantised: the modules that are quantised in the files, by the names that layers declare.
    """

    where: str
    rules: tuple[Rule, ...]
    quantised: frozenset[str] = frozenset()
    aliases: Aliases = lambda module: (module,)

    @property
    def names(self) -> Sequence[str]:
        return tuple(dict.fromkeys(rule.format.name for rule in self.rules if rule.format.name))

    def log(self, model: TensorOwner) -> None:
        log_kernels(model, self.names)

    def of_files(self, names: Collection[str]) -> Formats:
        found = (name.rpartition(".")[0] for name in names if name.endswith(QUANTISED))
        return replace(self, quantised=frozenset(found))

    def of(self, modules: Sequence[str], target: Target) -> Format:
        formats = [self._format_of(module, target) for module in modules]
        if any(format != formats[0] for format in formats):
            raise ConfigError(
                f"{self.where}: quantization_config gives {', '.join(modules)} different formats, "
                "but they are multiplied as one matrix; expected one format for all of them"
            )
        return formats[0]

    def _format_of(self, module: str, target: Target) -> Format:
        if PERHAPS_PLAIN.search(module) and module not in self.quantised:
            return PLAIN
        names = self.aliases(module)
        for rule in self.rules:
            if any(rule.matches(name, target) for name in names) != rule.others:
                return rule.format
        return PLAIN


@dataclass(frozen=True, slots=True)
class Method:
    """Reads the quantization_config of a `quant_method`
    (`minisgl_zoo.weights.formats.ReadFormats`). rules: from the section to its rules."""

    rules: Callable[[Section], list[Rule]]

    def __call__(
        self, values: Mapping[str, Any], where: str, aliases: Aliases = lambda module: (module,)
    ) -> ConfiguredFormats:
        rules = self.rules(Section(values, f"{where}: quantization_config"))
        return ConfiguredFormats(where=where, rules=tuple(rules), aliases=aliases)


class Section:
    """A JSON object of the config. where: what errors call it."""

    def __init__(self, values: object, where: str) -> None:
        if not isinstance(values, Mapping):
            raise ConfigError(f"{where} must be a JSON object, got {values!r}")
        self._values, self._where = values, where

    def get(self, key: str, default: Any = None) -> Any:
        value = self._values.get(key)
        return default if value is None else value

    def section(self, key: str) -> Section:
        return Section(self._values.get(key), f"{self._where}.{key}")

    def sections(self) -> list[Section]:
        return [self.section(key) for key in self._values]

    def names(self, key: str, default: Sequence[str] = ()) -> list[str]:
        """A list of strings; the default where the key is absent."""
        names = self.get(key, list(default))
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ConfigError(f"{self._where}.{key} must be a list of strings, got {names!r}")
        return names

    def size(self, key: str) -> int:
        """A positive integer."""
        if type(size := self.get(key)) is not int or size < 1:
            raise self.unsupported(key, "a positive integer")
        return size

    def block(self, key: str) -> tuple[int, int]:
        """Rows and columns of a block."""
        block = self.get(key)
        if (
            not isinstance(block, list)
            or len(block) != 2
            or not all(type(size) is int and size > 0 for size in block)
        ):
            raise self.unsupported(key, "two positive integers, the rows and columns of a block")
        return block[0], block[1]

    def pattern(self, text: str) -> re.Pattern[str]:
        try:
            return re.compile(text)
        except re.error as error:
            raise ConfigError(
                f"{self._where}: {text!r} is no regular expression: {error}"
            ) from error

    def check(self, key: str, *allowed: object) -> None:
        """Refuse any other value. None stands for an absent key."""
        if self.get(key) not in allowed:
            raise self.unsupported(key, " or ".join(repr(value) for value in allowed))

    def unsupported(self, key: str, expected: str) -> ConfigError:
        return ConfigError(
            f"{self._where}.{key} is {self.get(key)!r}, expected {expected}; supported are "
            f"{SUPPORTED}, and checkpoints in bfloat16, float16 or float32"
        )


def excluded(section: Section, names: Sequence[str]) -> Rule:
    """The rule that the modules of a transformers ignore list are plain. A name there is the end of
    a module's name, or a regular expression for its start up to a dot."""
    patterns = [section.pattern(name) for name in names]
    starts = [re.compile(rf"(?:{pattern.pattern})(?:(?<=\.)|(?=\.|$))") for pattern in patterns]
    return Rule(
        matches=lambda module, target: (
            module.endswith(tuple(names)) or any(start.match(module) for start in starts)
        ),
        format=PLAIN,
    )


def named(section: Section, names: Sequence[str]) -> Matches:
    """Matches modules with these names. A name re:... is a regular expression for their start."""
    patterns = [section.pattern(name[3:]) for name in names if name.startswith("re:")]
    return lambda module, target: (
        module in names or any(pattern.match(module) for pattern in patterns)
    )


def of_class(*names: str) -> Matches:
    return lambda module, target: target in names
