"""Finds the folder of a checkpoint and the files in it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal

from minisgl import plugins
from minisgl.errors import CheckpointError, ConfigError

Source = Literal["huggingface", "modelscope"]
GGUF_WEIGHTS: Final = "model.gguf"
"""The name by which a folder that was made of a GGUF file has its weights."""
CARD: Final = "gguf.json"
"""What a file of another format says of itself, beside the config that was made of it."""
_LFS_POINTER: Final = b"version https://git-lfs"


def resolve_checkpoint(model: str, *, source: Source = "huggingface", weights: bool = True) -> Path:
    """Return the local folder of a checkpoint.

    model: a folder, a GGUF file, or the id of a model to download, which may name a GGUF file
    (ORG/REPO:Q4_K_M or ORG/REPO/FILE.gguf). weights: False downloads only the text files (config
    and tokenizer), which are enough for `--dummy-weight`. Raises ConfigError if there is no such
    folder or id or if it cannot be downloaded, CheckpointError if the folder holds no config.json.
    """
    if not model:
        raise ConfigError(
            "the model is an empty string; name a folder or a model id like Qwen/Qwen3-0.6B, or "
            "leave it out for the built-in model"
        )
    folder = Path(os.path.expanduser(model))
    try:
        if not folder.is_dir():
            if folder.exists():
                return _folder_of_file(folder)
            from minisgl.utils.hub import downloaded

            folder = downloaded(model, source, weights=weights)
        has_config = (folder / "config.json").is_file()
    except OSError as error:  # a folder that this user may not enter
        raise ConfigError(f"{folder} cannot be read: {error.strerror}") from error
    if not has_config:
        raise CheckpointError(
            f"{folder} has no config.json; expected a checkpoint in Hugging Face format "
            f"(config.json, *.safetensors, tokenizer files){other_format(folder)}"
        )
    return folder


def fetched_adapters(places: Mapping[str, str], source: Source) -> dict[str, str]:
    """Return the folder of each adapter by its name. places: folders, or ids, which are downloaded.
    Raises ConfigError."""
    folders = {}
    for name, place in places.items():
        folder = os.path.expanduser(place)
        if os.path.isfile(folder):
            raise ConfigError(f"--lora {name}: {place} is a file; an adapter is PEFT's folder")
        if not os.path.isdir(folder):
            from minisgl.utils.hub import downloaded

            folder = str(downloaded(place, source, weights=True))
        folders[name] = os.path.realpath(folder)
    return folders


def fetched_draft_model(place: str | None, source: Source, *, weights: bool) -> str | None:
    """Return the folder of the draft model; None without one. For the others, and errors, see
    `resolve_checkpoint`."""
    return None if place is None else str(resolve_checkpoint(place, source=source, weights=weights))


def _folder_of_file(path: Path) -> Path:
    """Return the folder for a GGUF file. Raises ConfigError for another file, and what
    the row `folder` of the table `gguf` raises."""
    if not path.is_file():
        raise ConfigError(f"{path} is no regular file; name a folder, or a GGUF file")
    with path.open("rb") as file:
        is_gguf = path.suffix.lower() == ".gguf" or file.read(4) == b"GGUF"
    if is_gguf:
        folder_of: Callable[[Path], Path] = plugins.need("gguf", "folder", f"{path}, a GGUF file,")
        return folder_of(path)
    hint = f"; its folder {path.parent} has one" if (path.parent / "config.json").is_file() else ""
    raise ConfigError(
        f"{path} is a file, and no GGUF file; a model is a folder with a config.json, or a GGUF "
        f"file{hint}"
    )


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the object in a JSON file. Raises CheckpointError, which names the file."""
    try:
        value = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); {mending(path)}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def weight_files(folder: Path) -> list[Path]:
    """Return the files with the weights: model.safetensors, or the files that the index names.

    A folder may have other files with weights, such as Mistral's consolidated.safetensors. Raises
    CheckpointError if a file is missing.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise CheckpointError(
            f"{folder} has neither {single.name} nor {index.name}; only safetensors checkpoints "
            f"can be loaded{other_format(folder)}"
        )
    weight_map = read_json(index).get("weight_map")
    values = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not values or any(
        type(name) is not str or not name or Path(name).name != name for name in values
    ):
        raise CheckpointError(f"{index}: weight_map must map tensor names to files of this folder")
    names = sorted(set(values))
    if absent := [name for name in names if not (folder / name).is_file()]:
        raise CheckpointError(f"{folder} lacks {', '.join(absent)}, which {index.name} names")
    return [folder / name for name in names]


def mending(path: str | os.PathLike[str]) -> str:
    """Return what to do about a broken file of a checkpoint.

    Raises CheckpointError if this user cannot read the file.
    """
    try:
        with Path(path).open("rb") as file:
            is_pointer = file.read(len(_LFS_POINTER)) == _LFS_POINTER
    except FileNotFoundError:  # a link to nowhere
        is_pointer = False
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if is_pointer:
        return "git cloned a pointer to it instead of the file itself: run `git lfs pull` there"
    return "download it again"


def other_format(folder: Path) -> str:
    """Return "; " and what to do about the weights in `folder`, if their format is known but not
    supported; else ""."""
    if (folder / "adapter_config.json").is_file():
        base = read_json(folder / "adapter_config.json").get("base_model_name_or_path")
        return (
            f"; adapter_config.json says that this is an adapter (LoRA) of {base}: serve that "
            "model with --lora NAME=FOLDER"
        )
    if any(folder.glob("*.gguf")) or folder.name.lower().endswith("-gguf"):
        return "; to serve a GGUF file, name the file itself: minisgl serve FOLDER/NAME.gguf"
    if any(any(folder.glob(pattern)) for pattern in ("pytorch_model*.bin", "consolidated*.pth")):
        return (
            "; its weights are PyTorch pickles: take a copy of the model with safetensors, or make "
            "one with transformers: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained("
            "NEW_FOLDER), and copy the tokenizer's files"
        )
    return ""
