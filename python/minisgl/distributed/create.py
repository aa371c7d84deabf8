"""Chooses the communicator of a rank, once, where its engine is built."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minisgl.distributed.communicator import (
    DistributedCommunicator,
    DistributedInfo,
    SingleRank,
)
from minisgl.errors import ConfigError
from minisgl.utils.logger import get_logger

if TYPE_CHECKING:
    import torch

    from minisgl.distributed.gloo import GlooCommunicator

logger = get_logger(__name__)


def create_communicator(
    info: DistributedInfo, *, store: str, device: torch.device, pynccl: bool = True
) -> DistributedCommunicator:
    """The communicator of rank `info.rank`; returns when all `info.size` ranks have called this.

    store: file:///PATH (not existing yet, the same for all ranks) or tcp://HOST:PORT (rank 0
    listens). device: of the tensors. pynccl: on GPUs, our own binding of NCCL, not torch's; where
    one rank cannot have it, none has.
    Raises ConfigError (a wrong `store`, GPUs for some of the ranks alone) or EngineError (the ranks
    do not meet).
    """
    if info.size == 1:
        return SingleRank()
    import torch

    from minisgl.distributed.gloo import GlooCommunicator
    from minisgl.distributed.rendezvous import meet

    host = GlooCommunicator(info, meet(info, store))
    num_on_gpu = int(host.all_reduce(torch.tensor([int(device.type == "cuda")])))
    if 0 < num_on_gpu < info.size:
        raise ConfigError(
            f"{num_on_gpu} of {info.size} ranks found a GPU, the others compute on a CPU; give "
            "every machine its GPUs, or say --device cpu"
        )
    if device.type == "cpu":
        return host
    return _over_nccl(host, device, pynccl)


def _over_nccl(
    host: GlooCommunicator, device: torch.device, pynccl: bool
) -> DistributedCommunicator:
    import torch

    from minisgl.distributed.nccl import PyNcclCommunicator, TorchNcclCommunicator
    from minisgl.distributed.peer import connect_peers
    from minisgl.kernel import jit
    from minisgl.kernel.all_reduce import all_reduce_cubin

    library = None
    if pynccl:
        # Needed next, and takes seconds, once.
        jit.build_in_thread(lambda: all_reduce_cubin(device, host.size))
        try:
            library = jit.load_library(jit.CUDA)
        except jit.JitUnavailable as error:
            logger.info("torch's NCCL is used instead of our calls of it: %s", error)
    has_library = host.all_min(int(library is not None))
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # makes the context that the calls below use
        if not has_library:
            return TorchNcclCommunicator(host, device)
        return PyNcclCommunicator(host, library, connect_peers(host, device, library))
