"""Checks that config.json and the machine allow the number of ranks, before any process starts.

This reads one small JSON file and imports no torch. The engine checks the sizes and tensors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from minisgl.errors import ConfigError
from minisgl.runtime.args import RuntimeArgs
from minisgl.utils.gpus import num_gpus, too_few_gpus
from minisgl.utils.hf import read_json


def check_ranks(folder: Path, args: RuntimeArgs) -> None:
    """Raise ConfigError if a rank would have no GPU, no query head or no expert.

    If the machine has no GPUs, or config.json no number of heads or experts, the engine decides.
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
    needs_gpus = args.num_local > 1 and args.device != "cpu"
    if needs_gpus and (error := too_few_gpus(args.num_local, num_gpus())):
        raise ConfigError(error)


def _check_experts(config: dict[str, Any], num_ranks: int) -> None:
    if not any("expert" in field for field in config):
        raise ConfigError(
            "--ep splits experts over ranks, and config.json names none; leave it out"
        )
    num_experts = config.get("num_local_experts", config.get("num_experts"))
    if type(num_experts) is int and 0 < num_experts < num_ranks:
        raise ConfigError(
            f"--ep needs an expert for each of the --tp {num_ranks} ranks, and the model has "
            f"{num_experts}; leave --ep out, or use at most --tp {num_experts}"
        )
