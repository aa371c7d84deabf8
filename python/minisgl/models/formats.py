"""The formats of a checkpoint's weights: as config.json or ModelOpt's file describes them, or made
while loading."""

from __future__ import annotations

from pathlib import Path

from minisgl.core.args import Quantization
from minisgl.errors import ConfigError
from minisgl.models.config import Fields
from minisgl.quantization import Formats
from minisgl.utils.hf import read_json


def read_stored(config: Fields, modelopt: Path, quantization: Quantization | None) -> Formats:
    """modelopt: the path of that file. quantization: the format to make. Raises ConfigError."""
    values = config.values.get("quantization_config")
    if quantization:
        from minisgl.quantization.online_formats import OnlineFormats

        if values is not None or modelopt.is_file():
            raise ConfigError(
                f"--quantization {quantization} is for plain checkpoints, and {modelopt.parent} is "
                "quantised already; leave it out"
            )
        return OnlineFormats.of_kind(quantization)
    from minisgl.quantization.config import read_formats, read_modelopt_file

    if values is None:
        return read_modelopt_file(read_json(modelopt), str(modelopt))
    return read_formats(values, config.where)
