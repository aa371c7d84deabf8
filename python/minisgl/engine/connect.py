"""What an engine needs before it is built: its device, its communicator, its dtypes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from minisgl.core.args import EngineConfig
from minisgl.distributed import DistributedCommunicator, DistributedInfo
from minisgl.distributed.ranks import create_communicator
from minisgl.engine.cpu import CpuDevice
from minisgl.engine.device import Device, out_of_memory
from minisgl.errors import ConfigError
from minisgl.models import ModelConfig
from minisgl.utils.arch import slow_dtype_advice
from minisgl.utils.gpus import refuse_threads, too_few_gpus, warn_of_unused
from minisgl.utils.logger import get_logger

logger = get_logger(__name__)


def create_device(name: str, index: int = 0, count: int = 1, threads: int | None = None) -> Device:
    """Return the device that `--device` names; auto is a GPU if torch finds one.

    index: this rank's number among the `count` ranks on this machine. On GPUs each rank has its
    own; a CPU's cores are split over the ranks. threads: the threads of a CPU's steps; with None,
    start-up chooses between one and the rank's share of the cores. Raises ConfigError for too few
    GPUs, and for `threads` with a GPU.
    """
    if name == "cpu":
        return CpuDevice(count, threads)
    if name == "auto" and not torch.cuda.is_available():
        if index == 0:
            warn_of_unused(torch.__version__)
        return CpuDevice(count, threads)
    refuse_threads(threads)
    from minisgl.engine.cuda import CudaDevice

    if error := too_few_gpus(count, torch.cuda.device_count()):
        raise ConfigError(error)
    return CudaDevice(index)


def connect(config: EngineConfig) -> tuple[Device, DistributedCommunicator]:
    """Open this rank's device and its connection to the other ranks.

    Raises ConfigError and EngineError.
    """
    num_local = config.num_local
    device = create_device(config.device, config.rank % num_local, num_local, config.threads)
    try:
        comm = create_communicator(
            DistributedInfo(config.rank, config.tp),
            store=config.store,
            device=device.torch_device,
            pynccl=not config.disable_pynccl,
        )
    except Exception:
        device.close()
        raise
    return device, comm


@contextmanager
def closing_on_error(device: Device, comm: DistributedCommunicator) -> Iterator[None]:
    """Close the device if the block fails. A failed allocation becomes OutOfDeviceMemory."""
    try:
        yield
    except Exception as error:
        if comm.size == 1:  # else enqueued collectives may wait for other ranks without end
            device.close()
        if device.is_out_of_memory(error):
            raise out_of_memory("loading", "lower --memory-ratio or --num-pages", error) from error
        raise


def resolve_dtype(config: EngineConfig, model: ModelConfig, device: Device) -> torch.dtype:
    """Return the dtype that `--dtype` means. "auto" is the checkpoint's dtype; but if that is
    float16, and the CPU has no instructions for it, it is bfloat16.

    If the CPU has no instructions for the dtype, this logs what it costs a plain model.
    """
    dtype = model.dtype if config.dtype == "auto" else getattr(torch, config.dtype)
    if device.torch_device.type == "cpu" and (advice := slow_dtype_advice(dtype)):
        if dtype == torch.float16 and config.dtype == "auto":
            logger.info("float16 weights become bfloat16, which this CPU computes faster")
            return torch.bfloat16
        if not model.formats.names:  # quantised numbers have kernels in bfloat16 only
            logger.info("%s", advice)
    assert isinstance(dtype, torch.dtype)
    return dtype


def resolve_kv_dtype(config: EngineConfig, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that `--kv-cache-dtype` means for a model that computes in `dtype`."""
    by_name = {"auto": dtype, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
    return by_name[config.kv_cache_dtype]
