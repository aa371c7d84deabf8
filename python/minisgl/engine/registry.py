"""Creates the device by name."""

from __future__ import annotations

import torch

from minisgl.engine.cpu import CpuDevice
from minisgl.engine.device import Device
from minisgl.errors import ConfigError


def create_device(name: str, index: int = 0, count: int = 1, threads: int | None = None) -> Device:
    """Return the device that `--device` names; auto is a GPU if torch finds one.

    index: this rank's number among the `count` ranks on this machine. On GPUs each rank has its
    own; a CPU's cores are split over the ranks. threads: the threads of a CPU's steps; with None,
    start-up chooses between one and the rank's share of the cores. Raises ConfigError for too few
    GPUs, and for `threads` with a GPU.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"unknown device {name!r}; one of auto, cpu, cuda")
    if name == "cpu":
        return CpuDevice(count, threads)
    from minisgl.utils.gpus import refuse_threads, too_few_gpus, warn_of_unused

    if name == "auto" and not torch.cuda.is_available():
        if index == 0:
            warn_of_unused(torch.__version__)
        return CpuDevice(count, threads)
    refuse_threads(threads)
    from minisgl.engine.cuda import CudaDevice

    if error := too_few_gpus(count, torch.cuda.device_count()):
        raise ConfigError(error)
    return CudaDevice(index)
