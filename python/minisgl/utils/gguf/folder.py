"""Makes a checkpoint folder for a GGUF file of llama.cpp.

The folder is made once for each file, below the cache folder. It has config.json and the
tokenizer's files, which are made from the file's metadata, and a link to the file, from which
`minisgl.models.gguf` reads the weights. Source of the keys: llama.cpp's specification (docs/gguf.md
there).
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from minisgl import env
from minisgl.errors import CheckpointError, ConfigError, MinisglError
from minisgl.utils.gguf.card import CARD, card_of
from minisgl.utils.gguf.header import check_header
from minisgl.utils.gguf.parts import check_parts, parts_of
from minisgl.utils.logger import get_logger

logger = get_logger(__name__)

WEIGHTS: Final = "model.gguf"
"""The name of the link; the links to other parts are 2.gguf and so on."""
VERSION: Final = 5
"""The version of a folder's files. When they change, raise it: folders of older versions are then
not used."""
_SAMPLING: Final = {
    "temp": "temperature",
    "penalty_repeat": "repetition_penalty",
    **{name: name for name in ("top_k", "top_p", "min_p", "mirostat", "xtc_probability")},
}
"""The end of a key `general.sampling.` -> the field of generation_config.json. Source: llama.cpp's
pull request 17120, and `Keys.General` of its package gguf. Not here: the order of filters, and the
parameters of mirostat and XTC, which are named when they are in use."""
PLAIN: Final = ("F32", "F16", "BF16", "F64")
"""Types of tensors that are not quantised."""


def gguf_folder(path: Path) -> Path:
    """Return the folder for a GGUF file. Makes it if there is none.

    path: the file, or any of its parts. Raises ConfigError if the package gguf is missing, the
    model is not supported or the folder cannot be made, CheckpointError if the file is damaged or a
    part is missing.
    """
    parts = [part.resolve() for part in parts_of(path)]
    states = [(str(part), *_size_and_time(part)) for part in parts]
    key = repr((VERSION, *states)).encode()
    folder = env.cache_dir() / "gguf" / f"{path.stem}-{hashlib.sha256(key).hexdigest()[:12]}"
    if (folder / "config.json").is_file():
        return folder
    readers = [open_gguf(part) for part in parts]
    try:
        from minisgl.utils.gguf.config import config_of
        from minisgl.utils.gguf.tokenizer import tokenizer_files

        values = {name: field.contents() for name, field in readers[0].fields.items()}
        tensors = {tensor.name: tensor for reader in readers for tensor in reader.tensors}
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
        _make(folder, files, parts)
    except OSError as error:
        raise ConfigError(
            f"{folder.parent} cannot hold the config and tokenizer of {path.name}: "
            f"{error.strerror}; MINISGL_CACHE_DIR names another folder"
        ) from error
    logger.info("%s: its config and tokenizer are in %s", path.name, folder)
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


def _make(folder: Path, files: Mapping[str, str], parts: Sequence[Path]) -> None:
    """Make the folder, unless another process is faster."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        for name, text in files.items():
            (made / name).write_text(text, encoding="utf-8")
        for index, part in enumerate(parts):
            (made / (f"{index + 1}.gguf" if index else WEIGHTS)).symlink_to(part)
        made.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another process was faster
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _size_and_time(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def stored_types(arch: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json's `quantization_config`: the format of each quantised matrix."""
    types = {name: tensor.tensor_type.name for name, tensor in tensors.items()}
    quantised = {
        name: kind for name, kind in types.items() if name.endswith(".weight") and kind not in PLAIN
    }
    if not quantised:
        return {}
    return {"quantization_config": {"quant_method": "gguf", "arch": arch, "types": quantised}}


def open_weights(folder: Path) -> tuple[Any, list[Any]]:
    """Return the metadata and the tensors of all parts of a file.

    folder: of `gguf_folder`. Raises the same errors as `gguf_folder`.
    """
    first = open_gguf(folder / WEIGHTS)
    others = [open_gguf(path) for path in folder.glob("*.gguf") if path.name != WEIGHTS]
    return first.fields, [tensor for reader in (first, *others) for tensor in reader.tensors]


def open_gguf(path: Path) -> Any:
    """Return a gguf.GGUFReader, memory-mapped. Raises the same errors as `gguf_folder`."""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise ConfigError(
            f'{path}: GGUF files need the package gguf: pip install "minisgl[gguf]"'
        ) from None
    try:
        check_header(path)
        return GGUFReader(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} is damaged or incomplete ({error}); download it again"
        ) from error
