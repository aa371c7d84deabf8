"""Shared memory between the GPUs of one machine: either all ranks open it, or none."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from minisgl.distributed.gloo import GlooCommunicator
from minisgl.kernel.once import JitUnavailable
from minisgl.utils.logger import get_logger

logger = get_logger(__name__)


class SharedMemory(Protocol):
    """Memory of one rank, which the others open by its `handle`. Handles are equally long."""

    @property
    def handle(self) -> bytes: ...

    def connect(self, handles: list[bytes]) -> None:
        """Open the others' memory. Raises RuntimeError if a GPU cannot reach another's."""

    def close(self) -> None: ...


Memory = TypeVar("Memory", bound=SharedMemory)


def connect(host: GlooCommunicator, make: Callable[[], Memory], *, otherwise: str) -> Memory | None:
    """Return the result of `make`, connected on all ranks; or None on all ranks, and log why.

    make: may raise JitUnavailable or RuntimeError. otherwise: what is used instead, for the log.
    """
    memory, error = None, ""
    if len(set(_gather(host, _machine()))) > 1:
        error = "the ranks run on several machines"
    elif os.environ.get("NCCL_P2P_DISABLE") == "1":  # users set it for GPUs without peer access
        error = "NCCL_P2P_DISABLE=1"
    else:
        try:
            memory = make()
        except (JitUnavailable, RuntimeError) as reason:
            error = str(reason)
    if not _all_have(host, memory, otherwise, error):
        if memory:
            memory.close()
        return None
    assert memory is not None
    handles = _gather(host, memory.handle)
    connected: Memory | None = memory
    try:
        memory.connect(handles)
    except RuntimeError as reason:
        connected, error = None, str(reason)
    if not _all_have(host, connected, otherwise, error):
        memory.close()
        return None
    return memory


def _all_have(
    host: GlooCommunicator, memory: SharedMemory | None, otherwise: str, error: str
) -> bool:
    """Return whether every rank has memory. The first rank without it logs why."""
    first = host.all_min(host.size if memory else host.rank)
    if first == host.rank:
        logger.info("%s: %s", otherwise, error)
    return first == host.size


def _gather(host: GlooCommunicator, value: bytes) -> list[bytes]:
    """Return every rank's `value`; all are equally long."""
    rows = host.all_gather(torch.frombuffer(bytearray(value), dtype=torch.uint8)[None], 0)
    return [bytes(row) for row in rows.numpy()]


def _machine() -> bytes:
    """Return 64 bytes that differ from those of other machines."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = boot.read_bytes() if boot.exists() else socket.gethostname().encode()
    return name[:64].ljust(64)
