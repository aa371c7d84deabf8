"""The index of a folder that was made for a GGUF file: tensors.json.

It says where the file's tensors are, so that no rank reads the header again, and which contents the
folder's other files have, so that a damaged folder is made anew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from minisgl.errors import CheckpointError
from minisgl_zoo.gguf.header import MappedTensor, StoredTensor

INDEX: Final = "tensors.json"
WEIGHTS: Final = "model.gguf"
"""The name of the link to the file; the links to other parts are 2.gguf and so on."""


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One file. size: in bytes. time_ns: of its last change."""

    size: int
    time_ns: int
    tensors: tuple[StoredTensor, ...]


class Index(msgspec.Struct, frozen=True, kw_only=True):
    """values: the metadata, without lists. parts: the files in order. digests: SHA-256 of the
    folder's files, by name."""

    values: dict[str, Any]
    parts: tuple[Part, ...]
    digests: dict[str, str]


def link_of(number: int) -> str:
    """Return the name of the link to part `number`, which counts from 0."""
    return f"{number + 1}.gguf" if number else WEIGHTS


def size_and_time(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def write_files(
    folder: Path,
    files: Mapping[str, str],
    values: Mapping[str, Any],
    parts: Sequence[tuple[Path, Sequence[StoredTensor]]],
) -> None:
    """Write a folder's files, the links to the parts, and the index."""
    digests = {}
    for name, text in files.items():
        data = text.encode()
        (folder / name).write_bytes(data)
        digests[name] = hashlib.sha256(data).hexdigest()
    found = []
    for number, (path, tensors) in enumerate(parts):
        size, time_ns = size_and_time(path)
        found.append(Part(size=size, time_ns=time_ns, tensors=tuple(tensors)))
        (folder / link_of(number)).symlink_to(path)
    scalars = {key: value for key, value in values.items() if not isinstance(value, list)}
    index = Index(values=scalars, parts=tuple(found), digests=digests)
    (folder / INDEX).write_bytes(msgspec.json.encode(index))


def read_index(folder: Path) -> Index:
    """Return the index. Raises OSError, and ValueError if it is damaged."""
    return msgspec.json.decode((folder / INDEX).read_bytes(), type=Index)


def is_whole(folder: Path) -> bool:
    """Return whether the folder has the contents with which it was made."""
    try:
        index = read_index(folder)
        links = [folder / link_of(number) for number in range(len(index.parts))]
        return all(link.is_file() for link in links) and all(
            hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
            for name, digest in index.digests.items()
        )
    except (OSError, ValueError):
        return False


def map_file(path: Path) -> Any:
    """Return the bytes of a file as a memory-mapped array, uint8."""
    return np.memmap(path, "|u1", "r").view(np.ndarray)


def open_weights(folder: Path) -> tuple[Mapping[str, Any], list[MappedTensor]]:
    """Return the metadata, without lists, and the memory-mapped tensors of all parts.

    Raises CheckpointError if a file cannot be read, or has changed since the folder was made.
    """
    try:
        index = read_index(folder)
        tensors: list[MappedTensor] = []
        for number, part in enumerate(index.parts):
            path = folder / link_of(number)
            if size_and_time(path) != (part.size, part.time_ns):
                raise CheckpointError(f"{path.resolve()} has changed; start again to read it anew")
            mapped = map_file(path)
            tensors += [MappedTensor(stored, mapped) for stored in part.tensors]
    except (OSError, ValueError) as error:
        raise CheckpointError(f"the weights in {folder} cannot be read: {error}") from error
    return index.values, tensors
