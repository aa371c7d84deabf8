"""Downloads a checkpoint from ModelScope (`--model-source modelscope`)."""

from __future__ import annotations

from minisgl.errors import ConfigError


def download(model: str, patterns: list[str], ignored: list[str]) -> str:
    """See `minisgl.utils.hub.Download`."""
    try:
        from modelscope import snapshot_download
    except ImportError as error:
        raise ConfigError(
            "models from ModelScope need the package modelscope: pip install 'minisgl[modelscope]'"
        ) from error
    try:
        folder = snapshot_download(model, allow_patterns=patterns, ignore_patterns=ignored)
    except Exception as error:  # its errors have no common base
        raise ConfigError(
            f"{model} cannot be downloaded from ModelScope: {type(error).__name__}: {error}; check "
            "the id and the network, or pass a local folder"
        ) from error
    return str(folder)
