"""The checkpoint to serve, and what can be told of it and its ranks before any process starts.

Only small JSON files are read here, without torch: what takes the model's sizes or its tensors to
find out is the engine's to say.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from minisgl.core import SamplingParams
from minisgl.errors import ConfigError
from minisgl.server.args import ServerArgs
from minisgl.tokenizer.defaults import sampling_defaults
from minisgl.utils.arch import num_gpus, too_few_gpus
from minisgl.utils.hf import read_json, resolve_checkpoint
from minisgl.utils.logger import get_logger

logger = get_logger(__name__)

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
        folder = resolve_checkpoint(
            args.model, source=args.model_source, weights=not args.dummy_weight
        )
        is_folder = Path(args.model).expanduser().is_dir()
        name = folder.resolve().name if is_folder else args.model
    check_ranks(folder, args)
    name = args.served_model_name or name
    logger.info("the model is %s, from %s", name, folder)
    return Found(folder=folder, name=name, defaults=sampling_defaults(folder))


def check_ranks(folder: Path, args: ServerArgs) -> None:
    """Raise ConfigError if a rank would have no GPU, query head or expert: there may be hundreds.

    A config.json that says nothing clear of its heads or experts is left to the engine, as is a
    machine without GPUs.
    """
    config = read_json(folder / "config.json")
    num_heads = config.get("num_attention_heads")
    if type(num_heads) is int and 0 < num_heads < args.tp:
        raise ConfigError(
            f"--tp {args.tp} needs a query head for each rank, and the model has {num_heads}; "
            f"use at most --tp {num_heads}"
        )
    if args.ep:
        _check_experts(config, args.tp)
    num_local = args.tp // args.nnodes
    if num_local > 1 and args.device != "cpu" and (error := too_few_gpus(num_local, num_gpus())):
        raise ConfigError(error)


def _check_experts(config: dict[str, Any], num_ranks: int) -> None:
    if not any("expert" in field for field in config):
        raise ConfigError(
            "--ep shares experts among ranks, and config.json tells of none; leave it out"
        )
    num_experts = config.get("num_local_experts", config.get("num_experts"))
    if type(num_experts) is int and 0 < num_experts < num_ranks:
        raise ConfigError(
            f"--ep needs an expert for each of the --tp {num_ranks} ranks, and the model has "
            f"{num_experts}; leave --ep out, or use at most --tp {num_experts}"
        )
