"""Downloads a GGUF file of a Hugging Face repository, with all its parts."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from minisgl.errors import ConfigError
from minisgl.utils.hub import hub_errors
from minisgl.utils.logger import get_logger
from minisgl_zoo.gguf.folder import gguf_folder
from minisgl_zoo.gguf.parts import chosen

logger = get_logger(__name__)

MAX_NAMED: Final = 10
"""The most files of a folder that an error names."""

_NAME: Final = re.compile(
    r"(?:(?:https://)?(?:hf\.co|huggingface\.co)/)?(?P<repo>\w[\w.-]*/[\w.-]+?)"
    r"(?::(?P<tag>[\w.-]+)|/(?P<file>[\w./ -]+\.gguf))",
    re.ASCII,
)


def named_gguf(model: str) -> tuple[str, str] | None:
    """Return the repository and the choice in it of ORG/REPO:Q4_K_M or ORG/REPO/FILE.gguf, which
    may follow hf.co/. None for other names."""
    found = _NAME.fullmatch(model)
    return (found["repo"], found["tag"] or found["file"]) if found else None


def download_gguf(repo: str, choice: str) -> Path | None:
    """Download a GGUF file of `repo` with all its parts. Returns the path of the file or first
    part.

    choice: see `chosen`; if it is "" and the repository has no GGUF file, this returns None. With
    HF_HUB_OFFLINE set or without a network, it finds only files in the cache. Raises ConfigError as
    `downloaded` and `chosen` do.
    """
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download

    with hub_errors(repo) as offline:
        if offline:
            # The patterns match no file: the snapshot need not have any other file.
            folder = Path(snapshot_download(repo, allow_patterns=[], local_files_only=True))
            files = [path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf")]
        else:
            files = HfApi().list_repo_files(repo)
    if not (choice or any(name.endswith(".gguf") for name in files)):
        return None
    try:
        names = chosen(files, choice, repo)
    except ConfigError as error:
        cached = f"\nThis is what the local cache has; {offline}" if offline else ""
        raise ConfigError(f"{error}{cached}") from None
    logger.info("%s: taking %s", repo, " and ".join(names))
    with hub_errors(repo, offline):
        paths = [
            Path(hf_hub_download(repo, name, local_files_only=bool(offline))) for name in names
        ]
    return paths[0]


def named_checkpoint(model: str) -> Path | None:
    """Return the folder of the GGUF file that `model` names, as ORG/REPO:Q4_K_M; None if it names
    none. Raises what `download_gguf` and `gguf_folder` raise, and ConfigError for a path in a
    folder that is here: no file has this path."""
    path = Path(os.path.expanduser(model))
    if path.suffix == ".gguf" and path.parent.is_dir():
        names = sorted(each.name for each in path.parent.glob("*.gguf"))[:MAX_NAMED]
        beside = ", ".join(names) or "no GGUF file"
        raise ConfigError(f"there is no file {model}; {path.parent} has {beside}")
    named = named_gguf(model)
    found = download_gguf(*named) if named else None
    return gguf_folder(found) if found else None


def usual_checkpoint(repo: str) -> Path | None:
    """Return the folder of the usual GGUF file of a repository; None if it has none. Raises what
    `download_gguf` and `gguf_folder` raise."""
    path = download_gguf(repo, "")
    return gguf_folder(path) if path else None
