"""Downloads a checkpoint from Hugging Face, or another hub, into the cache of its library."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal

from minisgl import plugins
from minisgl.errors import ConfigError
from minisgl.utils.http import unusable_proxy

_MODEL_ID: Final = re.compile(r"\w[\w.-]*(/[\w.-]+)?", re.ASCII)
_TEXT_FILES: Final = ["*.json", "*.jinja", "*.model", "*.txt"]
_REACH_S: Final = 5.0
"""The time for a connection to the hub and for its first answer. A slow network takes about 1 s."""
_TRIES: Final = "5 more tries follow, for half a minute unless the hub asks for more"
# Some repositories have copies of the weights in other formats.
_IGNORED_FILES: Final = ["original/*", "consolidated*.safetensors", "onnx/*", "openvino/*"]

Download = Callable[[str, list[str], list[str]], str]
"""A row of the table `hubs`: from a model's id, and the patterns of files to take and to leave, to
its folder. Raises ConfigError."""


def downloaded(model: str, source: Literal["huggingface", "modelscope"], *, weights: bool) -> Path:
    """Return the folder of the model with this id. Downloads it if the cache lacks it.

    weights: also download the weights. On Hugging Face an id may name a GGUF file (see
    `named_gguf`). If a repository has GGUF files and no other weights, the usual GGUF file is
    taken. Raises ConfigError if there is no such id, if its licence must be accepted first, or if
    the hub cannot be reached.
    """
    has_ggufs = source == "huggingface"
    if has_ggufs and (":" in model or model.endswith(".gguf")):
        named = plugins.need("gguf", "named", f"{model}, a GGUF file,")
        if made := named(model):
            return Path(made)
    if not _MODEL_ID.fullmatch(model):
        raise ConfigError(f"there is no folder {model}, and it is no model id like Qwen/Qwen3-0.6B")
    patterns = _TEXT_FILES + (["*.safetensors"] if weights else [])
    download: Download = _from_huggingface
    if source != "huggingface":
        download = plugins.need("hubs", source, f"--model-source {source}")
    folder = Path(download(model, patterns, _IGNORED_FILES))
    lacks_weights = weights and not any(folder.glob("*.safetensors"))
    usual: Callable[[str], Path | None] | None = plugins.find("gguf", "usual")
    return (usual(model) if usual and has_ggufs and lacks_weights else None) or folder


def _from_huggingface(model: str, patterns: list[str], ignored: list[str]) -> str:
    from huggingface_hub import snapshot_download

    with hub_errors(model) as offline:
        folder = snapshot_download(
            model,
            allow_patterns=patterns,
            ignore_patterns=ignored,
            local_files_only=bool(offline),
        )
    return str(folder)


def why_offline() -> str:
    """Return why only the cache can be used and what to do, or "" if the hub can be reached.

    Without this question the library would ask again for 30 s, even for files that it has.
    """
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set: unset it to download"
    try:
        get_session().head(constants.ENDPOINT, timeout=_REACH_S)
    except _transport_errors() as error:
        return (
            f"{constants.ENDPOINT} cannot be reached ({type(error).__name__}: {error}): check the "
            "network, set HF_ENDPOINT to a mirror, or pass a local folder or .gguf file"
        )
    return ""


def _transport_errors() -> tuple[type[Exception], ...]:
    """Return the bases of what the library raises for a network that fails.

    Its own error inherits from its HTTP client's base: of requests, httpx, or httpx2 since version
    2. The package hf_xet, which downloads large files, raises RuntimeError.
    """
    import httpx
    from huggingface_hub import errors

    return (*errors.HfHubHTTPError.__bases__, httpx.HTTPError, OSError, RuntimeError, ValueError)


@contextmanager
def hub_errors(model: str, offline: str | None = None) -> Iterator[str]:
    """Yield `why_offline()`, and turn an error of huggingface_hub into a ConfigError that says what
    to do. The library tells of each request that it sends again; here it is told once.

    offline: what an earlier call has yielded; None asks, for up to `_REACH_S`.
    """
    from huggingface_hub import constants, errors

    library, told = logging.getLogger("huggingface_hub.utils._http"), list[str]()

    def tell_first(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if "thrown while requesting" in text and not told:
            told.append(text)
            logging.getLogger(__name__).warning("%s; %s", text, _TRIES)
        return "thrown while requesting" not in text and "[Retry" not in text

    library.addFilter(tell_first)
    log_in = "log in with `hf auth login` or set HF_TOKEN"
    try:
        offline = why_offline() if offline is None else offline
        yield offline
    except ImportError as error:  # the client needs another package for SOCKS
        raise unusable_proxy(error) from error
    except _transport_errors() as error:
        status = getattr(getattr(error.__cause__ or error, "response", None), "status_code", None)
        match error:
            case errors.GatedRepoError():
                hint = f"accept its licence at https://huggingface.co/{model}, {log_in}"
            case errors.RepositoryNotFoundError():
                hint = "Hugging Face has no such model, nor is there such a folder here; check the "
                hint += f"spelling, and if it is private {log_in}"
            case json.JSONDecodeError():
                hint = f"{constants.ENDPOINT} sends no JSON; a login page, a wrong mirror?"
            case errors.LocalEntryNotFoundError():
                answer = f"answers {status}" if status else "is not reachable"
                hint = "there is no such folder here, the local cache does not have all of it, and "
                hint += offline or f"{constants.ENDPOINT} {answer}; check the network, or try later"
            case _:
                then = log_in if status == 401 else "start again to continue the download"
                hint = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}; {then}"
        raise ConfigError(f"{model} cannot be downloaded: {hint}") from error
    finally:
        library.removeFilter(tell_first)
