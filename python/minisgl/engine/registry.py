"""The devices by name, and the one place that chooses."""

from __future__ import annotations

import torch

from minisgl.engine.cpu import CpuDevice
from minisgl.engine.device import Device
from minisgl.errors import ConfigError
from minisgl.utils.logger import get_logger
from minisgl.utils.text import counted

logger = get_logger(__name__)


def create_device(name: str, index: int = 0, count: int = 1, threads: int | None = None) -> Device:
    """`--device` by name; auto is a GPU where torch finds one.

    index: which of the `count` ranks on this machine it is for; each has a GPU of its own, a CPU
    they share. threads: of a CPU's steps; None lets the CPU choose. Raises ConfigError where
    there are too few GPUs, and for threads of a GPU.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"unknown device {name!r}; one of auto, cpu, cuda")
    if name == "cpu":
        return CpuDevice(count, threads)
    from minisgl.utils.gpus import gpus_of_driver, too_few_gpus

    if name == "auto" and not torch.cuda.is_available():
        if index == 0 and (num_unused := gpus_of_driver()):
            logger.warning(
                "computing on the CPU: this machine's driver has %s, but torch %s finds none; "
                "install a torch for CUDA (docs/cuda.md), or say --device cpu",
                counted(num_unused, "GPU"),
                torch.__version__,
            )
        return CpuDevice(count, threads)
    if threads is not None:
        raise ConfigError(
            f"--threads {threads} is for steps on a CPU, and this engine computes on a GPU: "
            "leave it out, or say --device cpu"
        )
    from minisgl.engine.cuda import CudaDevice

    if error := too_few_gpus(count, torch.cuda.device_count()):
        raise ConfigError(error)
    return CudaDevice(index)
