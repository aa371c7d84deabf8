"""The checkpoint to serve, and what can be told of it before any process starts.

Only small JSON files are read here, without torch: what takes the model's sizes or its tensors to
find out is the engine's to say.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from minisgl.core import SamplingParams
from minisgl.errors import ConfigError
from minisgl.server.args import ServerArgs
from minisgl.tokenizer.defaults import sampling_defaults
from minisgl.utils.hf import read_json, resolve_checkpoint

BUILTIN_NAME: Final = "minisgl-builtin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """name: under which it is served. defaults: of requests that leave sampling open."""

    folder: Path
    name: str
    defaults: SamplingParams


def find_checkpoint(args: ServerArgs) -> Found:
    """The model of `args.model`, downloaded if it has to be. Raises ConfigError."""
    if args.model is None:
        from minisgl.builtin import model_path

        folder, name = model_path(), BUILTIN_NAME
    else:
        folder = resolve_checkpoint(args.model, source=args.model_source)
        is_folder = Path(args.model).expanduser().is_dir()
        name = folder.resolve().name if is_folder else args.model
    check_ranks(folder, args.tp)
    return Found(
        folder=folder,
        name=args.served_model_name or name,
        defaults=sampling_defaults(folder),
    )


def check_ranks(folder: Path, num_ranks: int) -> None:
    """Raise ConfigError if some of the ranks would have no query head: there may be hundreds.

    A config.json that says nothing clear of its heads is left to the engine.
    """
    if num_ranks == 1:
        return
    num_heads = read_json(folder / "config.json").get("num_attention_heads")
    if type(num_heads) is int and 0 < num_heads < num_ranks:
        raise ConfigError(
            f"--tp {num_ranks} needs a query head for each rank, and the model has {num_heads}; "
            f"use at most --tp {num_heads}"
        )
