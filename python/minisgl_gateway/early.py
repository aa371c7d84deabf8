"""Checks that need no torch, so a server makes them before any process starts.

Each refuses only what the engine would refuse, seconds later and in the same words.
"""

from __future__ import annotations

import ctypes
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from minisgl.core.args import context_exceeded
from minisgl.errors import CheckpointError, ConfigError
from minisgl.runtime.args import RuntimeArgs
from minisgl.utils.gpus import NO_CUDA, gpus_of_driver, too_few_gpus
from minisgl.utils.hf import GGUF_WEIGHTS, mending, read_json, weight_files

_STRETCHED: Final = ("linear", "yarn")
"""The types of RoPE scaling whose factor may lengthen `max_position_embeddings`."""


def num_gpus() -> int:
    """Return the number of NVIDIA GPUs that torch may find, without importing it; 0 if unknown."""
    return 0 if version("torch").endswith("+cpu") else gpus_of_driver()


def has_no_gpu() -> bool:
    """Return whether torch cannot find a GPU: it is a build for CPUs, or there is no driver.

    False where that is not known: for a torch for ROCm, and a driver without NVML.
    """
    build = version("torch").partition("+")[2]
    if build == "cpu" or build.startswith("rocm"):
        return build == "cpu"
    return gpus_of_driver() == 0 and (_loads("libnvidia-ml.so.1") or not _loads("libcuda.so.1"))


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def check_options(args: RuntimeArgs) -> None:
    """Raise ConfigError for `--device cuda` on a machine without a GPU."""
    if args.device == "cuda" and has_no_gpu():
        raise ConfigError(NO_CUDA)


def check_checkpoint(folder: Path, args: RuntimeArgs) -> None:
    """Raise ConfigError and CheckpointError for a checkpoint that is on disk."""
    check_ranks(folder, args)
    check_context(folder, args)
    if not (args.dummy_weight or args.dry_run):
        check_weights(folder)


def check_context(folder: Path, args: RuntimeArgs) -> None:
    """Raise ConfigError if `--max-seq-len` exceeds the model's context.

    If config.json has a RoPE scaling that lengthens it, the engine decides.
    """
    config = _config_of(folder)
    context = config.get("max_position_embeddings")
    if args.max_seq_len is None or type(context) is not int or _is_stretched(config):
        return
    if args.max_seq_len > context:
        raise ConfigError(context_exceeded(args.max_seq_len, context))


def _config_of(folder: Path) -> dict[str, Any]:
    """Return config.json, in which the fields of the text model count first."""
    config = read_json(folder / "config.json")
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config


def _is_stretched(value: Any) -> bool:
    if isinstance(value, dict):
        return any(
            _is_stretched(part) or (key in ("type", "rope_type") and part in _STRETCHED)
            for key, part in value.items()
        )
    return False


def check_weights(folder: Path) -> None:
    """Raise CheckpointError if a safetensors file is missing or cut off. Of each only the header is
    read; a GGUF file's is read before its folder is made."""
    if (folder / GGUF_WEIGHTS).exists():
        return
    from safetensors import SafetensorError, safe_open

    for path in weight_files(folder):
        try:
            with safe_open(path, framework="numpy"):
                pass
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path} is damaged or incomplete ({error}); {mending(path)}"
            ) from error


def check_ranks(folder: Path, args: RuntimeArgs) -> None:
    """Raise ConfigError if a rank would have no GPU, no query head or no expert.

    If the machine has no GPUs, or config.json no number of heads or experts, the engine decides.
    """
    config = _config_of(folder)
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
