"""Finds the files of a GGUF model, which may be in parts.

Their names are those of llama.cpp's llama-gguf-split: NAME-00001-of-00003.gguf and so on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from minisgl.errors import CheckpointError, ConfigError

_PART: Final = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
MAX_NAMED: Final = 30
"""An error names at most so many files, so that it stays readable."""
USUAL: Final = "Q4_K_M"
"""llama.cpp and Ollama take this format if the user names none."""


def parts_of(path: Path) -> list[Path]:
    """Return all parts of a model in order. path: one of them. Raises CheckpointError if a part is
    missing."""
    found = _PART.fullmatch(path.name)
    if found is None:
        return [path]
    count = int(found[3])
    names = [f"{found[1]}-{number:05d}-of-{found[3]}.gguf" for number in range(1, count + 1)]
    if absent := [name for name in names if not (path.parent / name).is_file()]:
        listed = ", ".join(absent[:MAX_NAMED])
        raise CheckpointError(
            f"{path} is one of {count} parts, and {path.parent} lacks {listed}; download all parts"
        )
    return [path.parent / name for name in names]


def check_parts(path: Path, count: int, values: Mapping[str, Any], num_tensors: int) -> None:
    """Raise if the metadata of a model's first file contradicts its parts.

    count: files found. values: the metadata. num_tensors: found in all files. Raises ConfigError
    for another number of parts, CheckpointError for another number of tensors.
    """
    parts = values.get("split.count", 0) or 1
    if parts != count:
        raise ConfigError(
            f"{path} is one of {parts} parts by its metadata, but one of {count} by its name; "
            f"expected the parts beside it under the names NAME-00001-of-{parts:05d}.gguf and so on"
        )
    tensors = values.get("split.tensors.count", num_tensors)
    if tensors != num_tensors:
        raise CheckpointError(
            f"{path} and its other parts have {num_tensors} tensors, expected {tensors}; download "
            "all parts again"
        )


def chosen(files: Iterable[str], choice: str, where: str) -> list[str]:
    """Return the chosen file of the repository `where`, or all parts of it.

    choice: the path of a file, or the end of a file's name, such as Q4_K_M; "" takes the usual
    file, or the only one. Raises ConfigError unless exactly one model fits.
    """
    models: dict[str, list[str]] = {}
    for name in sorted(files):
        is_beside = re.search(r"(^|[/-])(mmproj|imatrix)", name, re.IGNORECASE)
        if name.endswith(".gguf") and not is_beside:
            models.setdefault(_stem(name), []).append(name)
    if choice.endswith(".gguf"):
        fitting = [_stem(choice)] if choice in models.get(_stem(choice), []) else []
    else:
        end = re.compile(rf"(.*[-./])?{re.escape(choice or USUAL)}", re.IGNORECASE | re.DOTALL)
        fitting = [model for model in models if end.fullmatch(model)]
        if not (fitting or choice):
            fitting = list(models)
    if len(fitting) > 1:  # NAME-UD-Q4_K_M ends with Q4_K_M, too
        shortest = min(map(len, fitting))
        fitting = [model for model in fitting if len(model) == shortest]
    if len(fitting) != 1:
        listed = "".join(f"\n  {names[0]}" for names in [*models.values()][:MAX_NAMED])
        asked = f"{len(fitting) or 'no'} GGUF files {choice}".rstrip()
        raise ConfigError(
            f"{where} has {asked}; name one, as in {where}/FILE.gguf or {where}:{USUAL}. It has"
            f"{listed or ' none'}"
        )
    return models[fitting[0]]


def _stem(name: str) -> str:
    found = _PART.fullmatch(name)
    return found[1] if found else name.removesuffix(".gguf")
