"""From config.json's `quantization_config` to the format of each module.

Two spellings are read: compressed-tensors (`quant_method: compressed-tensors`, groups of targets)
and the one of transformers and AutoFP8 (`quant_method: fp8`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minisgl.errors import ConfigError
from minisgl.quantization.fp8 import FP8_PER_TENSOR
from minisgl.quantization.weight import PLAIN, Format, Formats, Target

SUPPORTED = "fp8 (e4m3) weights with one scale per matrix, as compressed-tensors and fp8 write them"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Modules that `matches` (module, class) have this format."""

    matches: Callable[[str, Target], bool]
    format: Format


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfiguredFormats(Formats):
    """The first rule that matches a module decides; a module of no rule is plain."""

    where: str
    rules: tuple[Rule, ...]

    def of(self, modules: Sequence[str], target: Target) -> Format:
        formats = [self._of_one(module, target) for module in modules]
        if any(format != formats[0] for format in formats):
            raise ConfigError(
                f"{self.where}: quantization_config gives {', '.join(modules)} different formats, "
                "but they are multiplied as one matrix; expected one format for all of them"
            )
        return formats[0]

    def _of_one(self, module: str, target: Target) -> Format:
        rules = (rule.format for rule in self.rules if rule.matches(module, target))
        return next(rules, PLAIN)


def read_formats(config: object, where: str) -> Formats:
    """The formats that a `quantization_config` describes. where: its file, for errors.

    Raises ConfigError where it is malformed, or describes a format that is not supported.
    """
    section = _Section(config, f"{where}: quantization_config")
    method = section.get("quant_method")
    if method == "compressed-tensors":
        rules = _compressed_tensors(section)
    elif method == "fp8":
        rules = _fp8(section)
    else:
        raise section.unsupported("quant_method", "compressed-tensors or fp8")
    return ConfiguredFormats(where=where, rules=tuple(rules))


class _Section:
    """A JSON object of the config. where: what errors call it."""

    def __init__(self, values: object, where: str) -> None:
        if not isinstance(values, Mapping):
            raise ConfigError(f"{where} must be a JSON object, got {values!r}")
        self._values, self._where = values, where

    def get(self, key: str, default: Any = None) -> Any:
        value = self._values.get(key)
        return default if value is None else value

    def section(self, key: str) -> _Section:
        return _Section(self._values.get(key), f"{self._where}.{key}")

    def sections(self) -> list[_Section]:
        return [self.section(key) for key in self._values]

    def names(self, key: str) -> list[str]:
        """A list of strings; an empty one where the key is absent."""
        names = self.get(key, [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ConfigError(f"{self._where}.{key} must be a list of strings, got {names!r}")
        return names

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


def _compressed_tensors(config: _Section) -> list[Rule]:
    """Ignored modules first, then modules by name, then by class."""
    config.check("kv_cache_scheme", None)
    if config.get("sparsity_config"):
        config.section("sparsity_config").check("format", None, "dense")
    ignored = config.names("ignore")
    by_name, by_class = [], []
    for group in config.section("config_groups").sections():
        weights = group.section("weights")
        weights.check("type", "float")
        weights.check("num_bits", 8)
        weights.check("strategy", "tensor")
        weights.check("symmetric", None, True)
        weights.check("dynamic", None, False)
        if group.get("input_activations"):
            group.section("input_activations").check("type", "float")
            group.section("input_activations").check("num_bits", 8)
        targets = group.names("targets")
        by_name.append(Rule(matches=_names(group, targets), format=FP8_PER_TENSOR))
        by_class.append(Rule(matches=_classes(targets), format=FP8_PER_TENSOR))
    rules = [Rule(matches=_names(config, ignored), format=PLAIN)]
    rules.append(Rule(matches=_classes(ignored), format=PLAIN))
    return [*rules, *by_name, *by_class]


def _fp8(config: _Section) -> list[Rule]:
    """All linear layers but those of the ignore list, which is the LM head where it is absent."""
    config.check("weight_block_size", None)
    config.check("activation_scheme", None, "static", "dynamic")
    config.check("modules_to_convert", None, [])
    key = "ignored_layers" if config.get("ignored_layers") is not None else "modules_to_not_convert"
    ignored = ["lm_head"] if config.get(key) is None else config.names(key)

    # As transformers has it: a regular expression for the name's start, up to a dot; or its end.
    patterns = [config.pattern(name) for name in ignored]
    starts = [re.compile(rf"(?:{pattern.pattern})(?:(?<=\.)|(?=\.|$))") for pattern in patterns]

    def is_ignored(module: str, target: Target) -> bool:
        return module.endswith(tuple(ignored)) or any(start.match(module) for start in starts)

    return [
        Rule(matches=is_ignored, format=PLAIN),
        Rule(matches=_classes(["Linear"]), format=FP8_PER_TENSOR),
    ]


def _names(section: _Section, names: Sequence[str]) -> Callable[[str, Target], bool]:
    """Whether a module has one of these names. re:... is a regular expression for its start."""
    patterns = [section.pattern(name[3:]) for name in names if name.startswith("re:")]
    return lambda module, target: (
        module in names or any(pattern.match(module) for pattern in patterns)
    )


def _classes(names: Sequence[str]) -> Callable[[str, Target], bool]:
    return lambda module, target: target in names
