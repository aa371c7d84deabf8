"""The formats of a checkpoint's weights, stored or made while loading."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from minisgl import plugins
from minisgl.core.args import Quantization
from minisgl.errors import ConfigError
from minisgl.models.fields import Fields
from minisgl.models.spec import Family
from minisgl.quantization import UNQUANTISED, Formats
from minisgl.utils.hf import read_json


def formats_of(
    config: Fields,
    modelopt: Path,
    quantization: Quantization | None,
    family: Family,
    is_wrapped: bool,
) -> Formats:
    """Return the formats into which `quantization` converts plain weights, or else the formats that
    the checkpoint has. Raises ConfigError.

    modelopt: the path of ModelOpt's file, which is read if config.json describes no quantisation.
    """
    values = config.values.get("quantization_config")
    if isinstance(values, Mapping) and {"arch", "types"} <= values.keys():  # `utils.gguf` wrote it
        if not quantization:
            return UNQUANTISED  # `ModelConfig.from_folder` reads them once the config is complete
        has_mxfp4 = plugins.need("gguf", "has_mxfp4", "a GGUF file")
        values = values if has_mxfp4(values) else None  # others are dequantised and quantised anew
    if quantization:
        if values is not None or modelopt.is_file():
            raise ConfigError(
                f"--quantization {quantization} is for plain checkpoints, and {modelopt.parent} is "
                "quantised already; leave it out"
            )
        online = plugins.need("weight_formats", "online", f"--quantization {quantization}")
        made: Formats = online(quantization, config.integer("num_hidden_layers"))
        return made
    if values is None:
        read = plugins.need("weight_formats", "modelopt", f"{modelopt}: a quantised checkpoint")
        formats = read(read_json(modelopt), str(modelopt))
    else:
        where = f"{config.where}: a quantised checkpoint"
        formats = plugins.need("weight_formats", "config", where)(values, config.where)
    named: Formats = replace(formats, aliases=partial(names_in_files, family.names, is_wrapped))
    return named


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
