"""Chooses the communicator of a rank, once, where its engine is built."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minisgl.distributed.communicator import (
    DistributedCommunicator,
    DistributedInfo,
    SingleRank,
)

if TYPE_CHECKING:
    import torch


def create_communicator(
    info: DistributedInfo, *, store: str, device: torch.device, pynccl: bool = True
) -> DistributedCommunicator:
    """The communicator of rank `info.rank`; returns when all `info.size` ranks have called this.

    store: file:///PATH (not existing yet, the same for all ranks) or tcp://HOST:PORT (rank 0
    listens). device: of the tensors. pynccl: on GPUs, use our own binding of NCCL instead of
    torch's; if one rank cannot, none does.
    Raises ConfigError (a wrong `store`; only some of the ranks have GPUs) or EngineError (the ranks
    do not meet).
    """
    if info.size == 1:
        return SingleRank()
    from minisgl.distributed.ranks import connect_ranks

    return connect_ranks(info, store, device, pynccl)
