"""The formats of a checkpoint's weights, stored or made while loading."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from minisgl import plugins
from minisgl.core.args import Quantization
from minisgl.errors import ConfigError
from minisgl.models.config import Fields
from minisgl.quantization import UNQUANTISED, Formats
from minisgl.utils.hf import read_json

Aliases = Callable[[str], Sequence[str]]
"""From a module to its own name and its names in files."""
ReadFormats = Callable[[Mapping[str, Any], str, Aliases], Formats]
"""A row of table `weight_formats`, whose name is a `quant_method`: from quantization_config, the
file that has it, and the names of modules there. Raises ConfigError."""


def formats_of(
    config: Fields,
    modelopt: Path,
    quantization: Quantization | None,
    renames: Mapping[str, str],
    is_wrapped: bool,
) -> Formats:
    """Return the formats into which `quantization` converts plain weights, or else the formats that
    the checkpoint has. Raises ConfigError.

    modelopt: the path of ModelOpt's file, which is read if config.json describes no quantisation.
    """
    values = config.values.get("quantization_config")
    if isinstance(values, Mapping) and {"arch", "types"} <= values.keys():  # `utils.gguf` wrote it
        if not quantization:
            return UNQUANTISED  # `read_config` reads them once the config is complete
        has_mxfp4 = plugins.need("gguf", "has_mxfp4", "a GGUF file")
        values = values if has_mxfp4(values) else None  # others are dequantised and quantised anew
    if quantization:
        if values is not None or modelopt.is_file():
            raise ConfigError(
                f"--quantization {quantization} is for plain checkpoints, and {modelopt.parent} is "
                "quantised already; leave it out"
            )
        what = f"--quantization {quantization}"
        online = plugins.need("weight_formats", "online", what, made="while loading")
        made: Formats = online(quantization, config.integer("num_hidden_layers"))
        return made
    where, method = config.where, "modelopt"
    if values is None:
        values, where = read_json(modelopt), str(modelopt)
    else:
        method = _method_of(values, where)
    aliases = partial(names_in_files, renames, is_wrapped)
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
    if method not in names and not plugins.lacks("weight_formats"):
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
