"""Where a checkpoint comes from, and the small JSON files in it.

A model is a local folder, or an id on Hugging Face or ModelScope, whose files are downloaded once
into that library's own cache. The libraries are imported only when something is to be downloaded:
a server of a local folder starts without them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from minisgl.errors import CheckpointError, ConfigError

_TEXT_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]
_WEIGHT_FILES = ["*.safetensors"]
# Copies of the weights in other formats, which some repositories keep beside the ones that load.
_IGNORED_FILES = ["original/*", "consolidated*.safetensors", "onnx/*", "openvino/*"]
_LFS_POINTER = b"version https://git-lfs"
_MODEL_ID = re.compile(r"\w[\w.-]*(/[\w.-]+)?", re.ASCII)


def resolve_checkpoint(
    model: str,
    *,
    source: Literal["huggingface", "modelscope"] = "huggingface",
    weights: bool = True,
) -> Path:
    """The local folder of `model`, downloaded if it is none; with `weights=False` only its text
    files (config and tokenizer): all that `--dummy-weight` needs.

    Raises ConfigError if there is no such folder or id, if its licence must be accepted first, or
    if it cannot be reached; CheckpointError if the folder holds no config.json.
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
                raise ConfigError(f"{model} is a file; a model is a folder with a config.json")
            if not _MODEL_ID.fullmatch(model):
                raise ConfigError(
                    f"there is no folder {model}, and it is no model id like Qwen/Qwen3-0.6B"
                )
            download = _from_huggingface if source == "huggingface" else _from_modelscope
            patterns = _TEXT_FILES + (_WEIGHT_FILES if weights else [])
            folder = Path(download(model, patterns))
        has_config = (folder / "config.json").is_file()
    except OSError as error:  # a folder that this user may not enter
        raise ConfigError(f"{folder} cannot be read: {error.strerror}") from error
    if not has_config:
        raise CheckpointError(
            f"{folder} has no config.json; expected a checkpoint in Hugging Face format "
            "(config.json, *.safetensors, tokenizer files)"
        )
    return folder


def _from_huggingface(model: str, patterns: list[str]) -> str:
    import httpx
    from huggingface_hub import errors, snapshot_download

    log_in = "log in with `hf auth login` or set HF_TOKEN"
    hints = (
        (errors.GatedRepoError, f"accept its licence at https://huggingface.co/{model}, {log_in}"),
        (
            errors.RepositoryNotFoundError,
            "Hugging Face has no such model, nor is there such a folder here; check the spelling, "
            f"and if it is private {log_in}",
        ),
        (
            errors.LocalEntryNotFoundError,
            "it is not in the local cache, and Hugging Face is not reachable (or HF_HUB_OFFLINE is "
            "set); check the network, or pass a local folder",
        ),
    )
    try:
        folder = snapshot_download(model, allow_patterns=patterns, ignore_patterns=_IGNORED_FILES)
    except (errors.HFValidationError, httpx.HTTPError, OSError) as error:
        otherwise = f"{type(error).__name__}: {error}; starting again goes on from here"
        hint = next((text for kind, text in hints if isinstance(error, kind)), otherwise)
        raise ConfigError(f"{model} cannot be downloaded: {hint}") from error
    return str(folder)


def _from_modelscope(model: str, patterns: list[str]) -> str:
    try:
        from modelscope import snapshot_download
    except ImportError as error:
        raise ConfigError(
            "models from ModelScope need the package modelscope: pip install 'minisgl[modelscope]'"
        ) from error
    try:
        folder = snapshot_download(model, allow_patterns=patterns, ignore_patterns=_IGNORED_FILES)
    except Exception as error:  # its errors have no common base; all mean that there is no model
        raise ConfigError(
            f"{model} cannot be downloaded from ModelScope: {type(error).__name__}: {error}; check "
            "the id and the network, or pass a local folder"
        ) from error
    return str(folder)


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError, naming the file, if there is none."""
    try:
        value = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); {mending(path)}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def mending(path: str | os.PathLike[str]) -> str:
    """What to do about a broken file of a checkpoint.

    Raises CheckpointError if it is not broken, but this user may not read it, say.
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


_ASKS_FOR_NOTHING: Final[dict[str, tuple[Any, ...]]] = {
    "repetition_penalty": (1,),
    "encoder_repetition_penalty": (1,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "guidance_scale": (1,),
    "sequence_bias": ({},),
    "exponential_decay_length_penalty": (),
    "force_words_ids": ([],),
    "constraints": ([],),
    "stop_strings": ([],),
    "watermarking_config": (),
    "dola_layers": (),
    "token_healing": (False,),
    "top_h": (),
    "num_beams": (1,),
    "penalty_alpha": (0,),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "bad_words_ids": ([],),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
}
"""Of generation_config.json: what changes the tokens of transformers' `generate` and nothing here
does, with the values, besides null, that change nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """What a checkpoint recommends; None where it says nothing. ``temperature=0`` is greedy.

    unsupported: what else it asks for.
    """

    unsupported: dict[str, Any] = field(default_factory=dict)
    eos_token_ids: tuple[int, ...] = ()
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None


def read_generation_defaults(folder: Path) -> GenerationDefaults:
    """From generation_config.json; end-of-sequence ids from config.json where that has none.

    Raises CheckpointError, naming file and field, for a value of the wrong type. Bounds are
    checked where the values become `SamplingParams`.
    """
    file = folder / "generation_config.json"
    fields = read_json(file) if file.is_file() else {}
    eos = _token_ids(fields, file)
    if not eos and (folder / "config.json").is_file():
        eos = _token_ids(read_json(folder / "config.json"), folder / "config.json")
    sampled = fields.get("do_sample") is not False

    def number(name: str, kind: Callable[[float], Any]) -> Any:
        value = fields.get(name) if sampled else None
        if value is None:
            return None
        if type(value) not in (int, float) or not abs(value) < 2**31 or kind(value) != value:
            raise CheckpointError(f"{file}: {name} must be a number, got {value!r}")
        return kind(value)

    return GenerationDefaults(
        unsupported={
            name: value
            for name, nothing in _ASKS_FOR_NOTHING.items()
            if (value := fields.get(name)) is not None and value not in nothing
        },
        eos_token_ids=eos,
        temperature=number("temperature", float) if sampled else 0.0,
        top_k=number("top_k", int),
        top_p=number("top_p", float),
        min_p=number("min_p", float),
    )


def _token_ids(fields: dict[str, Any], file: Path) -> tuple[int, ...]:
    value = fields.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(type(token) is not int or token < 0 for token in ids):
        raise CheckpointError(
            f"{file}: eos_token_id must be a token id or a list of them, got {value!r}"
        )
    return tuple(dict.fromkeys(ids))
