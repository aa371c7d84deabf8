"""From config.json's `quantization_config` to the format of each module.

There is a `Method` for each `quant_method`; that of compressed-tensors is in a file of its own.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch

from minisgl.quantization.weight import PLAIN, Format, Target
from minisgl_zoo.weights.cut import ALL, Unit
from minisgl_zoo.weights.fp4 import NV_GROUP, Fp4
from minisgl_zoo.weights.fp4 import Spelling as Fp4Spelling
from minisgl_zoo.weights.grouped import Grouped
from minisgl_zoo.weights.grouped import Spelling as GroupedSpelling
from minisgl_zoo.weights.rules import Method, Rule, Section, excluded, of_class
from minisgl_zoo.weights.scaled import Scaled

NUMBERS: Final = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
PACKED: Final = 8
"""Numbers of 4 bits in an int32: files hold them so."""
PACKINGS: Final[Mapping[str, GroupedSpelling]] = {
    "auto_round:auto_gptq": "gptq",
    "auto_round:gptq": "gptq",
    "auto_round:gptqmodel": "gptq_v2",
    "auto_round:exllamav2": "gptq_v2",
    "auto_round": "gptq_v2",
    "auto_round:auto_awq": "awq",
}
"""AutoRound's `packing_format`."""
_EVERY: Final = {(ALL, ALL): "matrix", (1, ALL): "row"}


def scaled_format(number: str, unit: Unit, *, flat: bool = False) -> Format:
    """The format of 8-bit numbers ("fp8" or "int8") with a scale for each unit. flat: see
    `Scaled`."""
    every = _EVERY.get(unit) or f"block of {unit[0]} x {unit[1]}"
    return Format(
        name=f"{number}{' (e4m3)' if number == 'fp8' else ''}, a scale for each {every}",
        weight=Scaled(number=NUMBERS[number], unit=unit, flat=flat),
        unit=math.lcm(*(size or 1 for size in unit)),
    )


def grouped_format(
    spelling: GroupedSpelling, bits: int, group: int, *, has_zero: bool, act_order: bool
) -> Format:
    """The format of integers with a scale for each group of inputs; with group `ALL`, for each row.
    The parameters are those of `Grouped`."""
    kind = Grouped(
        spelling=spelling, bits=bits, group=group, has_zero=has_zero, act_order=act_order
    )
    every = f"group of {group}" if group else "row"
    unit = 1 if act_order else group or 1
    return Format(
        name=f"int{bits}, a scale for each {every}", weight=kind, unit=math.lcm(unit, PACKED)
    )


def fp4_format(spelling: Fp4Spelling) -> Format:
    """The format of 4-bit floats, as `Fp4` describes it."""
    weight = Fp4(spelling=spelling)
    name = f"{'MX' if weight.is_mx else 'NV'}FP4, a scale for each group of {weight.group}"
    return Format(name=name, weight=weight, unit=weight.group)


MXFP4: Final = fp4_format("gpt-oss")


def _fp8(config: Section) -> list[Rule]:
    is_blocked = config.get("weight_block_size") is not None
    unit = config.block("weight_block_size") if is_blocked else (ALL, ALL)
    config.check("fmt", None, "e4m3", "float8_e4m3fn")  # MiniMax-M2 writes the latter
    config.check("activation_scheme", None, "static", "dynamic")
    config.check("modules_to_convert", None, [])
    key = "ignored_layers" if config.get("ignored_layers") is not None else "modules_to_not_convert"
    return _linear_but(config, key, scaled_format("fp8", unit))


def _fbgemm(config: Section) -> list[Rule]:
    return _linear_but(config, "modules_to_not_convert", scaled_format("fp8", (1, ALL)))


def _linear_but(config: Section, key: str, format: Format) -> list[Rule]:
    """Rules: the modules of the ignore list `key` are plain, all other linear layers have `format`.
    A config without the list means the LM head."""
    ignored = excluded(config, config.names(key, ["lm_head"]))
    return [ignored, Rule(matches=of_class("Linear"), format=format)]


def _mxfp4(config: Section) -> list[Rule]:
    """Only experts are quantised, as in transformers."""
    ignored = excluded(config, config.names("modules_to_not_convert"))
    return [ignored, Rule(matches=lambda module, target: ".experts." in module, format=MXFP4)]


def _modelopt(config: Section) -> list[Rule]:
    """ModelOpt's rules, also from its own file hf_quant_config.json, which has them in an object
    `quantization`. Its ignored names may have wildcards. `--kv-cache-dtype` chooses the KV cache's
    format, so ModelOpt's key for it is not read."""
    if config.get("quantization") is not None:
        config = config.section("quantization")
    formats: dict[str, Format] = {
        "FP8": scaled_format("fp8", (ALL, ALL)),
        "FP8_PER_CHANNEL_PER_TOKEN": scaled_format("fp8", (1, ALL), flat=True),
        "NVFP4": fp4_format("modelopt"),
    }
    config.check("quant_algo", *formats)
    if config.get("quant_algo") == "NVFP4":
        config.check("group_size", None, NV_GROUP)
    names = [*config.names("exclude_modules"), *config.names("ignore")]
    return [
        Rule(matches=_wildcards(names), format=PLAIN),
        Rule(matches=of_class("Linear"), format=formats[config.get("quant_algo")]),
    ]


def _awq(config: Section) -> list[Rule]:
    config.check("version", None, "gemm", "GEMM")  # AutoAWQ writes what its caller wrote
    config.check("bits", 4)
    config.check("zero_point", True)
    group = _group(config, "group_size")
    format = grouped_format("awq", 4, group, has_zero=True, act_order=False)
    ignored = excluded(config, config.names("modules_to_not_convert"))
    return [ignored, *_layers(format)]


def _gptq(config: Section) -> list[Rule]:
    """GPTQ's rules. A checkpoint without `checkpoint_format` has version 1. In `dynamic`, names
    that begin with -: are plain; any other name is refused."""
    config.check("checkpoint_format", None, "gptq", "gptq_v2")
    config.check("bits", 4, 8)
    config.check("lm_head", None, False)
    config.check("desc_act", None, True, False)
    format = grouped_format(
        "gptq_v2" if config.get("checkpoint_format") == "gptq_v2" else "gptq",
        config.get("bits"),
        _group(config, "group_size"),
        has_zero=True,
        act_order=config.get("desc_act", False),
    )
    rules = []
    if config.get("dynamic"):
        overrides = config.section("dynamic")
        for name in config.get("dynamic"):
            if not name.startswith("-:"):
                raise overrides.unsupported(
                    name, "only names that start with -: (modules left out)"
                )
            pattern = overrides.pattern(name[2:])
            rules.append(Rule(matches=_where(pattern.match), format=PLAIN))
    blocks = config.get("modules_in_block_to_quantize")
    if blocks is None:
        return [*rules, *_layers(format)]
    try:
        ends = tuple(f".{name}" for names in blocks for name in names)
    except TypeError:
        raise config.unsupported("modules_in_block_to_quantize", "lists of names") from None
    others = Rule(matches=lambda module, target: module.endswith(ends), format=PLAIN, others=True)
    return [*rules, others, *_layers(format)]


def _auto_round(config: Section) -> list[Rule]:
    """AutoRound's rules. It packs as GPTQ or AWQ does (`PACKINGS`). A key of `extra_config` is a
    layer's name or a regular expression for all of it; its value may change bits and group."""

    def format(section: Section) -> Format:
        section.check("data_type", None, "int")
        section.check("bits", None, *bits)
        return grouped_format(
            packing,
            section.get("bits", config.get("bits")),
            _group(section if section.get("group_size") else config, "group_size"),
            has_zero=True,
            act_order=False,
        )

    config.check("packing_format", None, *PACKINGS)
    packing = PACKINGS[config.get("packing_format", "auto_round:auto_gptq")]
    bits = (4,) if packing == "awq" else (4, 8)
    config.check("bits", *bits)
    config.check("act_bits", None, 16, 32)
    rules = []
    if config.get("extra_config"):
        layers = config.section("extra_config")
        for name in config.get("extra_config"):
            layer = layers.section(name)
            kind = PLAIN if layer.get("bits") in (16, 32) else format(layer)
            rules.append(Rule(matches=_where(layers.pattern(name).fullmatch), format=kind))
    blocks = config.get("block_name_to_quantize")
    if blocks is not None:
        names = (
            blocks.split(",") if isinstance(blocks, str) else config.names("block_name_to_quantize")
        )
        starts = tuple(f"{name.strip()}." for name in names)
        rules.append(
            Rule(
                matches=lambda module, target: module.startswith(starts), format=PLAIN, others=True
            )
        )
    return [*rules, *_layers(format(config))]


def _group(config: Section, key: str) -> int:
    """The number of inputs in a group; `ALL` for -1."""
    return ALL if config.get(key) == -1 else config.size(key)


def _layers(format: Format) -> list[Rule]:
    """Rules: the linear layers inside the decoder's layers have `format`."""

    def is_inside(module: str, target: Target) -> bool:
        return target == "Linear" and ".layers." in module

    return [Rule(matches=is_inside, format=format)]


def _where(match: Callable[[str], re.Match[str] | None]) -> Callable[[str, Target], bool]:
    return lambda module, target: match(module) is not None


def _wildcards(names: Sequence[str]) -> Callable[[str, Target], bool]:
    """Whether the name of a module, or of a module that contains it, matches one of `names`."""

    def matches(module: str, target: Target) -> bool:
        path = module.split(".")
        paths = [".".join(path[:end]) for end in range(1, len(path) + 1)]
        return any(fnmatch.fnmatchcase(each, name) for name in names for each in paths)

    return matches


AUTO_ROUND: Final = Method(_auto_round)
AWQ: Final = Method(_awq)
FBGEMM_FP8: Final = Method(_fbgemm)
FP8: Final = Method(_fp8)
GPTQ: Final = Method(_gptq)
MODELOPT: Final = Method(_modelopt)
MXFP4_EXPERTS: Final = Method(_mxfp4)
