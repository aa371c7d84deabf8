"""Downloads a checkpoint from Hugging Face or ModelScope, once, into that library's own cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Literal

from minisgl.errors import ConfigError
from minisgl.utils.http import unusable_proxy

_TEXT_FILES: Final = ["*.json", "*.jinja", "*.model", "*.txt"]
_WEIGHT_FILES: Final = ["*.safetensors"]
# Copies of the weights in other formats, which some repositories keep beside those that load.
_IGNORED_FILES: Final = ["original/*", "consolidated*.safetensors", "onnx/*", "openvino/*"]


def download(model: str, source: Literal["huggingface", "modelscope"], *, weights: bool) -> str:
    """Download the model with this id and return its folder. weights: also the weight files.

    Raises ConfigError if there is no such id, if its licence must be accepted first, or if it
    cannot be reached.
    """
    patterns = _TEXT_FILES + (_WEIGHT_FILES if weights else [])
    fetch = _from_huggingface if source == "huggingface" else _from_modelscope
    return fetch(model, patterns)


def _from_huggingface(model: str, patterns: list[str]) -> str:
    from huggingface_hub import snapshot_download

    with hub_errors(model):
        folder = snapshot_download(model, allow_patterns=patterns, ignore_patterns=_IGNORED_FILES)
    return str(folder)


@contextmanager
def hub_errors(model: str) -> Iterator[None]:
    """Turn what huggingface_hub raises into ConfigError, which says what to do."""
    import httpx
    from huggingface_hub import errors

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
        yield
    except ImportError as error:  # of httpx, which has no SOCKS without one more package
        raise unusable_proxy(error) from error
    except (errors.HFValidationError, httpx.HTTPError, OSError) as error:
        otherwise = f"{type(error).__name__}: {error}; starting again goes on from here"
        hint = next((text for kind, text in hints if isinstance(error, kind)), otherwise)
        raise ConfigError(f"{model} cannot be downloaded: {hint}") from error


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
