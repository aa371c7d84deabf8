"""Connects the ranks: over gloo as hosts and CPUs, over NCCL as GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from minisgl import plugins
from minisgl.distributed.communicator import (
    DistributedCommunicator,
    DistributedInfo,
    SingleRank,
)
from minisgl.errors import ConfigError
from minisgl.kernel import jit
from minisgl.kernel.once import JitUnavailable
from minisgl.utils.logger import get_logger

if TYPE_CHECKING:
    from minisgl.distributed.gloo import GlooCommunicator

logger = get_logger(__name__)


def create_communicator(
    info: DistributedInfo, *, store: str, device: torch.device, pynccl: bool = True
) -> DistributedCommunicator:
    """Return rank `info.rank`'s communicator when all `info.size` ranks have called this.

    store: file:///PATH (a file that does not exist yet, the same for all ranks) or tcp://HOST:PORT
    (rank 0 listens there). device: of the tensors. pynccl: on GPUs, use our own binding of NCCL
    instead of torch's; if one rank cannot, none does. Raises ConfigError (a wrong `store`; only
    some of the ranks have GPUs) or EngineError (the ranks do not meet).
    """
    if info.size == 1:
        return SingleRank()
    # Not at the top: some builds of torch have no collectives, and one rank needs none.
    from minisgl.distributed.gloo import GlooCommunicator, meet

    host = GlooCommunicator(info, meet(info, store))
    num_on_gpu = int(host.all_reduce(torch.tensor([int(device.type == "cuda")])))
    if 0 < num_on_gpu < info.size:
        raise ConfigError(
            f"{num_on_gpu} of {info.size} ranks found a GPU, the others did not; give every rank a "
            "GPU, or say --device cpu"
        )
    return host if device.type == "cpu" else _over_nccl(host, device, pynccl)


def _over_nccl(
    host: GlooCommunicator, device: torch.device, pynccl: bool
) -> DistributedCommunicator:
    from minisgl.distributed.nccl import PyNcclCommunicator, TorchNcclCommunicator

    compile_cubin = plugins.find("all_reduce", "compile")
    connect_peers = plugins.find("all_reduce", "connect")
    library = None
    if pynccl:
        if compile_cubin:  # it is needed next, and takes seconds the first time
            jit.build_in_thread(lambda: compile_cubin(device, host.size))
        try:
            library = jit.load_library(jit.CUDA)
        except JitUnavailable as error:
            logger.info("torch's NCCL is used instead of our calls of it: %s", error)
    has_library = host.all_min(int(library is not None))
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # makes the context that the calls below use
        if not has_library:
            return TorchNcclCommunicator(host, device)
        peer = connect_peers(host, device, library) if connect_peers else None
        return PyNcclCommunicator(host, library, peer)
