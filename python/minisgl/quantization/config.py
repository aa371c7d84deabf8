"""From config.json's `quantization_config` to the format of each module.

Two spellings are read: compressed-tensors (`quant_method: compressed-tensors`, groups of targets)
and the one of transformers, DeepSeek and AutoFP8 (`quant_method: fp8`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from minisgl.errors import ConfigError
from minisgl.quantization.cut import ALL
from minisgl.quantization.scaled import Scaled
from minisgl.quantization.weight import PLAIN, Format, Formats, Target

SUPPORTED = (
    "fp8 (e4m3) weights with a scale for each matrix or block, as compressed-tensors and fp8 write "
    "them"
)
FP8_PER_TENSOR = Format(
    name="fp8 (e4m3), a scale for each matrix",
    weight=Scaled(number=torch.float8_e4m3fn, unit=(ALL, ALL)),
)


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

    @property
    def names(self) -> Sequence[str]:
        return tuple(dict.fromkeys(rule.format.name for rule in self.rules if rule.format.name))

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
        weights.check("strategy", "tensor", "block")
        weights.check("symmetric", None, True)
        weights.check("dynamic", None, False)
        if group.get("input_activations"):
            group.section("input_activations").check("type", "float")
            group.section("input_activations").check("num_bits", 8)
        is_block = weights.get("strategy") == "block"
        format = _fp8_blocks(weights.block("block_structure")) if is_block else FP8_PER_TENSOR
        targets = group.names("targets")
        by_name.append(Rule(matches=_names(group, targets), format=format))
        by_class.append(Rule(matches=_classes(targets), format=format))
    rules = [Rule(matches=_names(config, ignored), format=PLAIN)]
    rules.append(Rule(matches=_classes(ignored), format=PLAIN))
    return [*rules, *by_name, *by_class]


def _fp8(config: _Section) -> list[Rule]:
    """All linear layers but those of the ignore list, which is the LM head where it is absent."""
    has_blocks = config.get("weight_block_size") is not None
    format = _fp8_blocks(config.block("weight_block_size")) if has_blocks else FP8_PER_TENSOR
    config.check("fmt", None, "e4m3")
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
        Rule(matches=_classes(["Linear"]), format=format),
    ]


def _fp8_blocks(block: tuple[int, int]) -> Format:
    return Format(
        name=f"fp8 (e4m3), a scale for each block of {block[0]} x {block[1]}",
        weight=Scaled(number=torch.float8_e4m3fn, unit=block),
        unit=math.lcm(*block),
    )


def _names(section: _Section, names: Sequence[str]) -> Callable[[str, Target], bool]:
    """Whether a module has one of these names. re:... is a regular expression for its start."""
    patterns = [section.pattern(name[3:]) for name in names if name.startswith("re:")]
    return lambda module, target: (
        module in names or any(pattern.match(module) for pattern in patterns)
    )


def _classes(names: Sequence[str]) -> Callable[[str, Target], bool]:
    return lambda module, target: target in names
