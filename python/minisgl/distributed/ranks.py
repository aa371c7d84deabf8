"""Connects several ranks: over gloo as hosts and CPUs, over NCCL as GPUs."""

from __future__ import annotations

import torch

from minisgl.distributed.communicator import DistributedCommunicator, DistributedInfo
from minisgl.distributed.gloo import GlooCommunicator
from minisgl.distributed.rendezvous import meet
from minisgl.errors import ConfigError
from minisgl.utils.logger import get_logger

logger = get_logger(__name__)


def connect_ranks(
    info: DistributedInfo, store: str, device: torch.device, pynccl: bool
) -> DistributedCommunicator:
    """See `create_communicator`."""
    host = GlooCommunicator(info, meet(info, store))
    num_on_gpu = int(host.all_reduce(torch.tensor([int(device.type == "cuda")])))
    if 0 < num_on_gpu < info.size:
        raise ConfigError(
            f"{num_on_gpu} of {info.size} ranks found a GPU, the others did not; give every rank a "
            "GPU, or say --device cpu"
        )
    if device.type == "cpu":
        return host
    return _over_nccl(host, device, pynccl)


def _over_nccl(
    host: GlooCommunicator, device: torch.device, pynccl: bool
) -> DistributedCommunicator:
    from minisgl.distributed.nccl import PyNcclCommunicator, TorchNcclCommunicator
    from minisgl.kernel import jit
    from minisgl.kernel.library import JitUnavailable
    from minisgl_kernels.all_reduce import all_reduce_cubin
    from minisgl_kernels.peer import connect_peers

    library = None
    if pynccl:
        # It is needed next, and takes seconds the first time.
        jit.build_in_thread(lambda: all_reduce_cubin(device, host.size))
        try:
            library = jit.load_library(jit.CUDA)
        except JitUnavailable as error:
            logger.info("torch's NCCL is used instead of our calls of it: %s", error)
    has_library = host.all_min(int(library is not None))
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # makes the context that the calls below use
        if not has_library:
            return TorchNcclCommunicator(host, device)
        return PyNcclCommunicator(host, library, connect_peers(host, device, library))
