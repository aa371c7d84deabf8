"""`minisgl pull`, `list` and `rm`: the models in the cache of huggingface_hub.

The cache is the library's own, which other programs share. It is looked at and emptied by the
library; the configs that were made of a removed GGUF file go with it.
"""

from __future__ import annotations

import difflib
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from minisgl import env
from minisgl.errors import ConfigError
from minisgl.server.flags import Parser
from minisgl.utils.hf import resolve_checkpoint
from minisgl.utils.text import size_of

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo

ABOUT: Final = {
    "pull": "download a model, such as Qwen/Qwen3-0.6B or ORG/REPO:Q4_K_M",
    "list": "show the models that are downloaded",
    "rm": "remove a downloaded model",
}
_NAMES: Final = {"pull": "ORG/REPO[:TYPE]", "rm": "ORG/REPO"}


def models_parser(command: str) -> Parser:
    """Return the parser of `minisgl pull`, `list` or `rm`."""
    about = f"{ABOUT[command][0].upper()}{ABOUT[command][1:]}."
    parser = Parser(f"minisgl {command}", description=about)
    if command in _NAMES:
        parser.add_argument("model", metavar=_NAMES[command], help="the model's id on Hugging Face")
    if command == "rm":
        parser.epilog = "It asks nothing: the name must be one that `minisgl list` shows."
    return parser


def _manage(command: str, argv: Sequence[str], began: float) -> int:
    """Run the command, and return the exit code."""
    given = models_parser(command).parse_all(argv)
    try:
        if command == "list":
            print(_table(_cached()))
        elif command == "pull":
            _pull(given["model"])
        else:
            print(_remove(given["model"]))
    except ConfigError as error:
        print(f"minisgl {command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


pull = partial(_manage, "pull")
show = partial(_manage, "list")
remove = partial(_manage, "rm")


def _pull(model: str) -> None:
    if Path(model).expanduser().exists():
        raise ConfigError(f"{model} is a file or folder of this machine: minisgl serve {model}")
    folder = resolve_checkpoint(model)
    print(f"{model} is in {folder}; minisgl serve {model} serves it")


def _cached() -> list[CachedRepoInfo]:
    """Return the repositories of models in the cache, by name."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return []
    return sorted((r for r in repos if r.repo_type == "model"), key=lambda r: r.repo_id.lower())


def _table(repos: Sequence[CachedRepoInfo]) -> str:
    if not repos:
        return "no model is downloaded; minisgl pull ORG/REPO downloads one"
    rows = [("NAME", "SIZE", "CHANGED", "WEIGHTS")]
    for repo in repos:
        size = size_of(repo.size_on_disk)
        rows.append((repo.repo_id, size, repo.last_modified_str, _weights(repo)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _weights(repo: CachedRepoInfo) -> str:
    """Return the names of the GGUF files, or "safetensors", or "none" for a part of a model."""
    names = {file.file_name for revision in repo.revisions for file in revision.files}
    if ggufs := sorted(name for name in names if name.endswith(".gguf")):
        return ", ".join(ggufs)
    return "safetensors" if any(name.endswith(".safetensors") for name in names) else "none"


def _remove(model: str) -> str:
    """Remove the repository with exactly this name. Returns what was done."""
    from huggingface_hub import scan_cache_dir

    repos = {repo.repo_id: repo for repo in _cached()}
    repo = repos.get(model)
    if repo is None:
        name = model.partition(":")[0]
        whole = f"all its files are removed together: minisgl rm {name}" if name in repos else ""
        near = difflib.get_close_matches(model, repos, n=1)
        hint = whole or (f"did you mean {near[0]}?" if near else "minisgl list shows the names")
        raise ConfigError(f"{model} is not the name of a downloaded model; {hint}")
    # The library finds revisions by their hash alone, and a copy of a repository has the same ones.
    alone = replace(scan_cache_dir(), repos=frozenset({repo}))
    alone.delete_revisions(*(revision.commit_hash for revision in repo.revisions)).execute()
    if repo.repo_path.exists():  # the library logs what it could not remove
        raise ConfigError(f"{repo.repo_path} cannot be removed, or only in part")
    for folder in (env.cache_dir() / "gguf").glob("*"):
        link = folder / "model.gguf"
        if link.is_symlink() and link.readlink().is_relative_to(repo.repo_path.resolve()):
            shutil.rmtree(folder, ignore_errors=True)
    return f"removed {model}: {size_of(repo.size_on_disk)}"
