"""All-reduce of small tensors through memory that the GPUs of one machine share.

Between the kernels of a decode step NCCL's latency is what counts, not its bandwidth. Here one
kernel per GPU writes into the others' memory and reads what they wrote; `all_reduce.cu` explains
how, and why nothing has to wait for a barrier. The memory is allocated once, opened by the others
through CUDA's IPC handles, and never registered or moved, so that graphs can capture a call.

Where a call goes is decided by dtype and number of bytes alone: every rank decides alike.
"""

from __future__ import annotations

import ctypes
import os
import socket
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minisgl.distributed.communicator import DistributedInfo
from minisgl.distributed.gloo import GlooCommunicator
from minisgl.kernel.all_reduce import (
    ALGORITHMS,
    EMPTY,
    PACK_BYTES,
    THREADS,
    TYPES,
    all_reduce_cubin,
)
from minisgl.kernel.jit import JitUnavailable
from minisgl.utils.logger import get_logger

logger = get_logger(__name__)

MAX_SHARE_BYTES = 2 << 20
"""What one rank may send another in one trip: 1,024 blocks, which an H200 (132 multiprocessors, 64
registers a thread at 8 ranks) runs all at once. Each of N ranks takes 4 N times as much memory."""
SECOND_TRIP_BYTES = 256 << 10
"""What a GPU sends over NVLink in the time that a second trip takes: one trip is taken where it
sends no more than this above what two would send. Four H200s, in a graph: one trip takes 4.6 us for
128 KB and 7.5 for 256 KB, two take 5.3 and 5.9."""


def choose_algorithm(num_bytes: int, size: int, share_bytes: int) -> str | None:
    """For so many bytes of each of `size` ranks, which can send another `share_bytes` in a trip."""
    if num_bytes == 0 or num_bytes % PACK_BYTES:
        return None
    more = num_bytes * (size - 1) * (size - 2) // size  # is sent in one trip than in two
    if num_bytes <= share_bytes and more <= SECOND_TRIP_BYTES:
        return "one_shot"
    return "two_shot" if num_bytes <= share_bytes * size else None


class PeerAllReduce:
    """This rank's memory and its view of the others'. Mutable: the memory, until it is closed."""

    def __init__(
        self, info: DistributedInfo, device: torch.device, library: Any, share_bytes: int
    ) -> None:
        """Raises JitUnavailable or RuntimeError where this cannot work."""
        self._info, self._library, self._opened = info, library, list[int]()
        cubin = library.cubin_load(all_reduce_cubin(device, info.size))
        self._kernels = {
            (algorithm, dtype): library.cubin_kernel(cubin, f"{algorithm}_{name}")
            for algorithm in ALGORITHMS
            for dtype, name in TYPES.items()
        }
        self._capacity = share_bytes // PACK_BYTES
        rooms_bytes = 4 * info.size * share_bytes
        turns_bytes = -(-self._capacity // THREADS) * 4
        self._memory = library.memory_allocate(rooms_bytes + turns_bytes, EMPTY)
        torch.cuda.synchronize(device)  # all of it is EMPTY before another rank can write
        self.handle: bytes = bytes(library.memory_handle(self._memory))

    def connect(self, handles: list[bytes]) -> None:
        """Open the others' memory. Raises RuntimeError where a GPU cannot reach another's."""
        addresses = []
        for rank, handle in enumerate(handles):
            if rank == self._info.rank:
                addresses.append(self._memory)
                continue
            addresses.append(self._library.memory_open(handle))
            self._opened.append(addresses[-1])
        # struct Ranks of all_reduce.cu
        fields = (*addresses, self._info.rank, self._capacity)
        self._ranks = (ctypes.c_int64 * len(fields))(*fields)
        self._ranks_address = ctypes.addressof(self._ranks)

    def algorithm(self, x: Tensor) -> str | None:
        """What sums tensors like this one fastest here; None where NCCL should."""
        if x.dtype not in TYPES:
            return None
        return choose_algorithm(x.nbytes, self._info.size, self._capacity * PACK_BYTES)

    def all_reduce(self, x: Tensor, algorithm: str) -> Tensor:
        """The sum, in place where `x` is contiguous and aligned."""
        x = x.contiguous()
        if x.data_ptr() % PACK_BYTES:
            x = x.clone()
        count = x.nbytes // PACK_BYTES
        threads = count if algorithm == "one_shot" else -(-count // self._info.size)
        self._library.kernel_launch(
            self._kernels[algorithm, x.dtype],
            -(-threads // THREADS),
            THREADS,
            x.data_ptr(),
            count,
            self._ranks_address,
            torch.cuda.current_stream().cuda_stream,
        )
        return x

    def close(self) -> None:
        """What was enqueued is done: nobody writes here any more."""
        for address in self._opened:
            self._library.memory_close(address)
        self._library.memory_free(self._memory)


def connect_peers(
    host: GlooCommunicator, device: torch.device, library: Any, share_bytes: int = MAX_SHARE_BYTES
) -> PeerAllReduce | None:
    """All ranks', or None on all ranks, with one log line that says why."""
    peer, error = None, ""
    if len(set(_gather(host, _machine()))) > 1:
        error = "the ranks run on several machines"
    elif os.environ.get("NCCL_P2P_DISABLE") == "1":  # the customary word for GPUs that cannot
        error = "NCCL_P2P_DISABLE=1"
    else:
        try:
            peer = PeerAllReduce(host.info, device, library, share_bytes)
        except (JitUnavailable, RuntimeError) as reason:
            error = str(reason)
    if not _all_have(host, peer, error):
        if peer:
            peer.close()
        return None
    assert peer is not None
    handles = _gather(host, peer.handle)
    connected: PeerAllReduce | None = peer
    try:
        peer.connect(handles)
    except RuntimeError as reason:
        connected, error = None, str(reason)
    if not _all_have(host, connected, error):
        peer.close()
        return None
    return peer


def _all_have(host: GlooCommunicator, peer: PeerAllReduce | None, error: str) -> bool:
    """The first rank that has none says why."""
    first = host.all_min(host.size if peer else host.rank)
    if first == host.rank:
        logger.info("NCCL does all sums, none go through shared memory: %s", error)
    return first == host.size


def _gather(host: GlooCommunicator, value: bytes) -> list[bytes]:
    """Every rank's; all are equally long."""
    rows = host.all_gather(torch.frombuffer(bytearray(value), dtype=torch.uint8)[None], 0)
    return [bytes(row) for row in rows.numpy()]


def _machine() -> bytes:
    """Tells this machine from others, in 64 bytes."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = boot.read_bytes() if boot.exists() else socket.gethostname().encode()
    return name[:64].ljust(64)
