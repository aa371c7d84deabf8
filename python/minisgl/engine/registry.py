"""The devices by name, and the one place that chooses."""

from __future__ import annotations

import torch

from minisgl.engine.cpu import CpuDevice
from minisgl.engine.device import Device
from minisgl.errors import ConfigError


def create_device(name: str, index: int = 0, count: int = 1) -> Device:
    """`--device` by name; auto is a GPU where torch finds one.

    index: which of the `count` ranks on this machine it is for; each has a GPU of its own, a CPU
    they share. Raises ConfigError where there are too few GPUs.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"unknown device {name!r}; one of auto, cpu, cuda")
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return CpuDevice(count)
    from minisgl.engine.cuda import CudaDevice

    num_gpus = torch.cuda.device_count()
    if 0 < num_gpus < count:
        raise ConfigError(
            f"{count} ranks on this machine need a GPU each, but torch finds {num_gpus}; lower "
            "--tp, spread the ranks with --nnodes, or look at CUDA_VISIBLE_DEVICES"
        )
    return CudaDevice(index)
