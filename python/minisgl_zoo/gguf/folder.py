"""Makes a checkpoint folder for a GGUF file of llama.cpp.

The folder is made once for each file, below the cache folder. It has config.json and the
tokenizer's files, which are made from the file's metadata, a link to the file, and an index, by
which `minisgl_zoo.gguf` finds the weights in it. A file with another size or time gets another
folder, and a damaged folder is made anew. Source of the keys: llama.cpp's specification
(docs/gguf.md there).
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, Final

from minisgl import env
from minisgl.errors import CheckpointError, ConfigError, MinisglError
from minisgl.utils.hf import CARD, mending
from minisgl.utils.logger import get_logger
from minisgl_zoo.gguf.header import MappedTensor, StoredTensor, read_header
from minisgl_zoo.gguf.index import is_whole, map_file, size_and_time, write_files
from minisgl_zoo.gguf.parts import check_parts, parts_of

_GUESSED: Final = 1024
"""llama.cpp sets this flag in a `general.file_type` that no converter wrote."""


def card_of(values: Mapping[str, Any], tensors: Mapping[str, MappedTensor]) -> dict[str, Any]:
    """Return the architecture, the name of the file's type, such as Q4_K_M, and the number of
    parameters.

    values: the metadata. tensors: of all parts. If the metadata have no type that is known, it is
    the one that most parameters have.
    """
    from gguf import LlamaFileType

    sizes = {name: prod(tensor.shape) for name, tensor in tensors.items()}
    types: Counter[str] = Counter()
    for name, tensor in tensors.items():
        types[tensor.kind] += sizes[name]
    names = {kind.value: kind.name.partition("_")[2] for kind in LlamaFileType}
    names.pop(_GUESSED, None)
    usual = types.most_common(1)[0][0] if types else ""
    return {
        "architecture": values["general.architecture"],
        "file_type": names.get(values.get("general.file_type", -1), usual),
        "num_parameters": sum(sizes.values()),
    }


logger = get_logger(__name__)

VERSION: Final = 7
"""Raise this version when a folder's files change: folders of older versions are then not used."""
_SAMPLING: Final = {
    "temp": "temperature",
    "penalty_repeat": "repetition_penalty",
    **{name: name for name in ("top_k", "top_p", "min_p", "mirostat", "xtc_probability")},
}
"""The end of a key `general.sampling.` -> the field of generation_config.json. Source: llama.cpp's
pull request 17120, and `Keys.General` of its package gguf. Not here: the order of filters, and the
parameters of mirostat and XTC, which are named when they are in use."""
PLAIN: Final = ("F32", "F16", "BF16", "F64")
"""Tensors of these types are not quantised."""


def gguf_folder(path: Path) -> Path:
    """Return the folder for a GGUF file. Makes it if there is none.

    path: the file, or any of its parts. Raises ConfigError if the model is not supported or the
    folder cannot be made, CheckpointError if the file is damaged or a part is missing.
    """
    parts = [part.resolve() for part in parts_of(path)]
    states = [(str(part), *size_and_time(part)) for part in parts]
    key = repr((VERSION, *states)).encode()
    folder = env.cache_dir() / "gguf" / f"{path.stem}-{hashlib.sha256(key).hexdigest()[:12]}"
    if is_whole(folder):
        return folder
    start = time.monotonic()
    headers = [open_header(part) for part in parts]
    values = headers[0][0]
    found = [[tensor.stored for tensor in tensors] for _, tensors in headers]
    try:
        from minisgl_zoo.gguf.config import config_of
        from minisgl_zoo.gguf.tokenizer import tokenizer_files

        tensors = {tensor.name: tensor for _, own in headers for tensor in own}
        check_parts(path, len(parts), values, len(tensors))
        config = config_of(values, tensors, path) | stored_types(
            values["general.architecture"], tensors
        )
        config["_name_or_path"] = name_of(values)
        files = {"config.json": json.dumps(config, indent=1)}
        files[CARD] = json.dumps(card_of(values, tensors))
        files |= tokenizer_files(values, path)
        if sampling := sampling_of(values):
            files["generation_config.json"] = json.dumps(sampling, indent=1)
    except MinisglError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} lacks metadata of a language model, or has it in an unknown form: {error!r}"
        ) from error
    try:
        _make(folder, files, values, list(zip(parts, found, strict=True)))
    except OSError as error:
        raise ConfigError(
            f"{folder.parent} cannot hold the config and tokenizer of {path.name}: "
            f"{error.strerror}; MINISGL_CACHE_DIR names another folder"
        ) from error
    logger.info(
        "%s: its config and tokenizer are in %s (%.1f s)",
        path.name,
        folder,
        time.monotonic() - start,
    )
    return folder


def name_of(values: Mapping[str, Any]) -> str:
    """Return the model's name and the name of its family, as far as the file has them."""
    return " ".join(str(values.get(f"general.{key}", "")) for key in ("basename", "name")).strip()


def sampling_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return generation_config.json, of the keys that llama.cpp's converter copies from it."""
    given = {name: values.get(f"general.sampling.{key}") for key, name in _SAMPLING.items()}
    return {
        name: float(f"{value:.6g}") if isinstance(value, float) else value  # was 32 bits
        for name, value in given.items()
        if value is not None
    }


def open_header(path: Path) -> tuple[dict[str, Any], list[MappedTensor]]:
    """Return the metadata and the memory-mapped tensors of a file. Raises CheckpointError if the
    file is damaged or cannot be read."""
    try:
        values, stored = read_header(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(
            f"{path} is damaged or incomplete ({error}); {mending(path)}"
        ) from error
    mapped = map_file(path)
    return values, [MappedTensor(tensor, mapped) for tensor in stored]


def stored_types(arch: str, tensors: Mapping[str, MappedTensor]) -> dict[str, Any]:
    """Return config.json's `quantization_config`: the format of each quantised matrix."""
    quantised = {
        name: tensor.kind
        for name, tensor in tensors.items()
        if name.endswith(".weight") and tensor.kind not in PLAIN
    }
    if not quantised:
        return {}
    return {"quantization_config": {"quant_method": "gguf", "arch": arch, "types": quantised}}


def _make(
    folder: Path,
    files: Mapping[str, str],
    values: Mapping[str, Any],
    parts: Sequence[tuple[Path, Sequence[StoredTensor]]],
) -> None:
    """Make the folder, unless another process is faster. A damaged one gives way to it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        write_files(made, files, values, parts)
        if folder.exists() and not is_whole(folder):
            shutil.rmtree(folder)
        made.rename(folder)
    except OSError:
        if not is_whole(folder):  # else another process was faster
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
