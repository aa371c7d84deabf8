"""All-reduce of small tensors through memory that the GPUs of one machine share.

NCCL's latency, not its bandwidth, limits the small all-reduces of a decode step. Here one kernel
per GPU writes into the other GPUs' memory and reads what they wrote; `peer_memory.cuh` explains
how, and why it needs no barrier. In a decoder a residual addition and a norm follow each
all-reduce: `add_norm` computes them in the same kernel. The memory is allocated once, opened by the
other ranks through CUDA IPC handles, and never moved, so CUDA graphs can capture a call.

Only the dtype and the number of bytes decide which algorithm a call takes, so all ranks choose the
same one.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from minisgl.distributed.communicator import DistributedInfo
from minisgl.distributed.gloo import GlooCommunicator
from minisgl_kernels.all_reduce import (
    ALGORITHMS,
    EMPTY,
    PACK_BYTES,
    ROW_ITEMS,
    ROW_THREADS,
    THREADS,
    TYPES,
    Rows,
    all_reduce_cubin,
)
from minisgl_kernels.shared import connect

MAX_SHARE_BYTES = 2 << 20
"""The most bytes that a rank sends another in one trip: 1,024 blocks, which an H200 (132
multiprocessors, 64 registers a thread at 8 ranks) runs at once. Each of N ranks allocates 8 N times
as much."""
MAX_ROWS = 1024  # the most rows that `add_norm` sends in one trip
SECOND_TRIP_BYTES = 256 << 10
"""The bytes that a GPU sends over NVLink in the time of a second trip. `one_shot` is chosen if it
sends at most this many bytes more than `two_shot`. On four H200s, in a graph, one trip takes 4.6 us
for 128 KB and 7.5 us for 256 KB; two trips take 5.3 and 5.9 us."""


def share_of(info: DistributedInfo, x: Tensor, num_rows: int) -> Tensor:
    """Return this rank's rows of x. x has all `num_rows` rows, or only this rank's."""
    if len(x) != num_rows:
        return x
    share = info.share(num_rows)
    return x[share.start : share.stop]


def choose_algorithm(num_bytes: int, size: int, share_bytes: int) -> str | None:
    """Return the algorithm for an all-reduce of `num_bytes` on `size` ranks; None for NCCL.

    share_bytes: the most that a rank can send another in one trip.
    """
    if num_bytes == 0 or num_bytes % PACK_BYTES:
        return None
    more = num_bytes * (size - 1) * (size - 2) // size  # what one trip sends above two
    if num_bytes <= share_bytes and more <= SECOND_TRIP_BYTES:
        return "one_shot"
    return "two_shot" if num_bytes <= share_bytes * size else None


class _Rooms:
    """A part of the shared memory, with rooms of its own: see `peer_memory.cuh`."""

    def __init__(self, library: Any, info: DistributedInfo, capacity: int, num_turns: int) -> None:
        """capacity: the most packs that a rank sends another in one trip. num_turns: the most
        blocks."""
        self._library, self._info, self._capacity = library, info, capacity
        size = 4 * info.size * capacity * PACK_BYTES + num_turns * 4
        self._memory = library.memory_allocate(size, EMPTY)
        self._opened: list[int] = []
        self.handle: bytes = bytes(library.memory_handle(self._memory))

    def connect(self, handles: list[bytes]) -> None:
        """Open the other ranks' memory. Raises RuntimeError if a GPU cannot reach another's."""
        addresses = []
        for rank, handle in enumerate(handles):
            if rank == self._info.rank:
                addresses.append(self._memory)
                continue
            addresses.append(self._library.memory_open(handle))
            self._opened.append(addresses[-1])
        fields = (*addresses, self._info.rank, self._capacity)
        self.ranks = (ctypes.c_int64 * len(fields))(*fields)  # struct Ranks

    def close(self) -> None:
        for address in self._opened:
            self._library.memory_close(address)
        self._library.memory_free(self._memory)


class PeerAllReduce:
    """This rank's memory and its view of the other ranks'. Mutable: owns memory until `close`."""

    def __init__(
        self, info: DistributedInfo, device: torch.device, library: Any, share_bytes: int
    ) -> None:
        """Raises JitUnavailable or RuntimeError if the kernels cannot be built or the memory cannot
        be allocated."""
        self._info, self._library = info, library
        cubin = library.cubin_load(all_reduce_cubin(device, info.size))
        self._kernels = {
            (algorithm, dtype): library.cubin_kernel(cubin, f"{algorithm}_{name}")
            for algorithm in (*ALGORITHMS, *(f"add_norm_{x}" for x in ALGORITHMS))
            for dtype, name in TYPES.items()
        }
        self._dependent = torch.cuda.get_device_capability(device) >= (9, 0)
        self._capacity = share_bytes // PACK_BYTES
        self._row_packs = 0  # packs of a row; the first call sets it for all calls
        num_blocks = -(-self._capacity // THREADS)
        self._sums = _Rooms(library, info, self._capacity, num_blocks)
        self._rows = _Rooms(library, info, self._capacity, MAX_ROWS)
        torch.cuda.synchronize(device)  # the memory is EMPTY before another rank can write

    @property
    def handle(self) -> bytes:
        return self._sums.handle + self._rows.handle

    def connect(self, handles: list[bytes]) -> None:
        """Open the other ranks' memory. Raises RuntimeError if a GPU cannot reach another's."""
        self._sums.connect([handle[: len(handle) // 2] for handle in handles])
        self._rows.connect([handle[len(handle) // 2 :] for handle in handles])

    def algorithm(self, x: Tensor) -> str | None:
        """Return the fastest algorithm for tensors like this one; None for NCCL."""
        if x.dtype not in TYPES:
            return None
        return choose_algorithm(x.nbytes, self._info.size, self._capacity * PACK_BYTES)

    def all_reduce(self, x: Tensor, algorithm: str) -> Tensor:
        """Return the sum over all ranks, in place if `x` is contiguous and aligned."""
        x = _aligned(x)
        count = x.nbytes // PACK_BYTES
        threads = count if algorithm == "one_shot" else -(-count // self._info.size)
        fields = (ctypes.c_int64 * 2)(x.data_ptr(), count)
        address = ctypes.addressof(fields)
        self._launch(
            self._kernels[algorithm, x.dtype], -(-threads // THREADS), THREADS,
            address, address + 8, ctypes.addressof(self._sums.ranks),
        )  # fmt: skip
        return x

    def row_algorithm(self, x_TD: Tensor) -> str | None:
        """Return `add_norm`'s algorithm for such rows; None if it cannot or NCCL is faster."""
        num_rows, size = x_TD.shape
        algorithm = self.algorithm(x_TD)
        packs = size * x_TD.itemsize // PACK_BYTES
        if algorithm is None or size * x_TD.itemsize % PACK_BYTES:
            return None
        if num_rows == 1 and algorithm == "two_shot":
            return None  # rank 0's share would be used for all rows
        if packs > ROW_THREADS * ROW_ITEMS or packs != (self._row_packs or packs):
            return None
        sent = num_rows if algorithm == "one_shot" else -(-num_rows // self._info.size)
        return algorithm if sent <= min(self._capacity // packs, MAX_ROWS) else None

    def add_norm(
        self,
        x_TD: Tensor,
        residual_TD: Tensor | None,
        weight: Tensor,
        eps: float,
        algorithm: str,
    ) -> tuple[Tensor, Tensor]:
        """See `DistributedCommunicator.add_norm`. In place if the arguments are contiguous and
        aligned. two_shot returns this rank's share of the residual."""
        x_TD, weight = _aligned(x_TD), _aligned(weight)
        count, packs = len(x_TD), x_TD.shape[1] * x_TD.itemsize // PACK_BYTES
        has_residual = residual_TD is not None
        if residual_TD is None:
            residual_TD = torch.empty_like(x_TD)
        if algorithm == "two_shot":
            residual_TD = share_of(self._info, residual_TD, count)
        residual_TD = _aligned(residual_TD)
        self._row_packs = packs
        rows = Rows(
            x_TD.data_ptr(), residual_TD.data_ptr(), weight.data_ptr(), count, packs,
            has_residual, weight.dtype != x_TD.dtype, eps,
        )  # fmt: skip
        items = -(-packs // ROW_THREADS)
        threads = -(-packs // (32 * items)) * 32
        self._launch(
            self._kernels[f"add_norm_{algorithm}", x_TD.dtype],
            count if algorithm == "one_shot" else -(-count // self._info.size), threads,
            ctypes.addressof(rows), ctypes.addressof(self._rows.ranks),
        )  # fmt: skip
        return x_TD, residual_TD

    def _launch(self, kernel: int, blocks: int, threads: int, *parameters: int) -> None:
        """parameters: addresses on the host."""
        array = (ctypes.c_int64 * len(parameters))(*parameters)
        stream = torch.cuda.current_stream().cuda_stream
        address = ctypes.addressof(array)
        self._library.kernel_launch(kernel, blocks, threads, 0, 1, address, self._dependent, stream)

    def close(self) -> None:
        """Close and free the memory. All enqueued calls must have ended."""
        self._sums.close()
        self._rows.close()


def _aligned(x: Tensor) -> Tensor:
    x = x.contiguous()
    return x.clone() if x.data_ptr() % PACK_BYTES else x


def connect_peers(
    host: GlooCommunicator, device: torch.device, library: Any, share_bytes: int = MAX_SHARE_BYTES
) -> PeerAllReduce | None:
    """Connect all ranks. Returns None on all ranks if one of them fails, and logs why."""
    return connect(
        host,
        lambda: PeerAllReduce(host.info, device, library, share_bytes),
        otherwise="NCCL does all all-reduces, none go through shared memory",
    )
