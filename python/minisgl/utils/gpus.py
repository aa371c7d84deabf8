"""This machine's GPUs, counted without torch, and what is said of options that do not fit them."""

from __future__ import annotations

import ctypes
import os
from itertools import takewhile
from typing import Final

from minisgl.errors import ConfigError
from minisgl.utils.logger import get_logger
from minisgl.utils.text import counted

NO_CUDA: Final = (
    "--device cuda: torch finds no CUDA device here (is the driver installed, and is torch a CUDA "
    "build?); --device cpu runs without"
)


def gpus_of_driver() -> int:
    """Return the number of NVIDIA GPUs that the driver gives to this process; 0 if unknown.

    This asks the driver's management library, as torch does, because a process that has initialized
    CUDA cannot fork any more.
    """
    count = ctypes.c_uint()
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return 0
    except (OSError, AttributeError):
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return count.value

    def is_device(name: str) -> bool:
        if name.isdecimal():
            return int(name) < count.value
        return name.startswith(("GPU-", "MIG-"))

    # CUDA ignores the names after the first that is not a GPU.
    return len(list(takewhile(is_device, map(str.strip, visible.split(",")))))


def too_few_gpus(num_ranks: int, num_gpus: int) -> str | None:
    """Return a sentence if this machine has GPUs, but fewer than ranks; else None."""
    if not 0 < num_gpus < num_ranks:
        return None
    return (
        f"{num_ranks} ranks on this machine need a GPU each, but torch finds {num_gpus}; lower "
        "--tp, spread the ranks with --nnodes, look at CUDA_VISIBLE_DEVICES, or say --device cpu"
    )


def warn_of_unused(torch_version: str) -> None:
    """Log a warning if the driver has GPUs that torch does not find."""
    if num_unused := gpus_of_driver():
        get_logger(__name__).warning(
            "computing on the CPU: this machine's driver has %s, but torch %s finds none; "
            "install a torch for CUDA (docs/gpus.md), or say --device cpu",
            counted(num_unused, "GPU"),
            torch_version,
        )


def refuse_threads(threads: int | None) -> None:
    """Raise ConfigError for `--threads` of an engine on a GPU."""
    if threads is not None:
        raise ConfigError(
            f"--threads {threads} is for steps on a CPU, and this engine computes on a GPU: "
            "leave it out, or say --device cpu"
        )
