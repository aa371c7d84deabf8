"""The formats of a checkpoint's weights, stored or made while loading."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from minisgl import plugins
from minisgl.core.args import Quantization
from minisgl.errors import ConfigError
from minisgl.models.config import ModelConfig
from minisgl.models.registry import get_model_class
from minisgl.quantization import Formats
from minisgl.utils.hf import read_json
from minisgl_zoo.gguf.formats import GgufFormats, has_mxfp4
from minisgl_zoo.weights.online_formats import online_formats
from minisgl_zoo.weights.rules import Aliases

ReadFormats = Callable[[Mapping[str, Any], str, Aliases], Formats]
"""A row of table `weight_formats`, whose name is a `quant_method`: from quantization_config, the
file that has it, and the names of modules there. Raises ConfigError."""


def read_formats(config: ModelConfig, modelopt: Path, quantization: Quantization | None) -> Formats:
    """Return the formats into which `quantization` converts plain weights, or else the formats that
    the checkpoint has. Raises ConfigError.

    config: whose formats are not known yet. modelopt: the path of ModelOpt's file, which is read if
    config.json describes no quantisation.
    """
    where = config.fields.where
    values = config.fields.values.get("quantization_config")
    if isinstance(values, Mapping) and {"arch", "types"} <= values.keys():  # of a GGUF file
        if not quantization:
            return GgufFormats.read(config)
        if not has_mxfp4(values):  # others are dequantised and quantised anew
            return online_formats(quantization, config.num_layers)
    if quantization:
        if values is not None or modelopt.is_file():
            raise ConfigError(
                f"--quantization {quantization} is for plain checkpoints, and {modelopt.parent} is "
                "quantised already; leave it out"
            )
        return online_formats(quantization, config.num_layers)
    method = "modelopt"
    if values is None:
        values, where = read_json(modelopt), str(modelopt)
    else:
        method = _method_of(values, where)
    renames = get_model_class(config.architecture).names
    aliases = partial(names_in_files, renames, config.is_wrapped)
    read: ReadFormats = plugins.need("weight_formats", method, f"{where}: a quantised checkpoint")
    return read(values, where, aliases)


def _method_of(values: object, where: str) -> str:
    """Return the name of the row that reads a quantization_config. Raises ConfigError."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where}: quantization_config must be a JSON object, got {values!r}")
    method = values.get("quant_method")
    if method is None and values.get("quant_algo"):
        return "modelopt"  # which once wrote no method
    if method is None and values.get("group_size") and values.get("bits"):
        raise ConfigError(
            f"{where}: this is a checkpoint for Apple's MLX, whose layout is not read here; take "
            "the original, with --quantization int4 for as few bytes, or a GGUF file of the model"
        )
    names = [row.name for row in plugins.rows("weight_formats")]
    if method not in names:
        raise ConfigError(
            f"{where}: quantization_config.quant_method is {method!r}, expected "
            f"{' or '.join(names)}, or a checkpoint in bfloat16, float16 or float32"
        )
    return str(method)


def names_in_files(renames: Mapping[str, str], is_wrapped: bool, module: str) -> list[str]:
    """Return all names that a checkpoint may use for a module. Its files use one of them, and its
    quantization_config may use another one."""
    names = [f"{module}."]
    for part, declared in [*renames.items()][::-1]:
        names += [name.replace(declared, part) for name in names if declared in name]
    if is_wrapped:
        inner = [name.removeprefix("model.") for name in names if name.startswith("model.")]
        names += [f"language_model.{name}" for name in names]
        names += [f"model.language_model.{name}" for name in inner]
    return [name[:-1] for name in names]
