"""All-reduce of small tensors through memory that the GPUs of one machine share.

Between the kernels of a decode step NCCL's latency is what counts, not its bandwidth. Here one
kernel per GPU writes into the others' memory and reads what they wrote; `all_reduce.cu` explains
how, and why nothing has to wait for a barrier. A decoder's sums are followed by a residual addition
and a norm: `add_norm` does these in the same kernel. The memory is allocated once, opened by the
others through CUDA's IPC handles, and never registered or moved, so that graphs can capture a call.

Where a call goes is decided by dtype and number of bytes alone: every rank decides alike.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from minisgl.distributed.communicator import DistributedInfo
from minisgl.distributed.gloo import GlooCommunicator
from minisgl.distributed.shared import connect
from minisgl.kernel.all_reduce import (
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

MAX_SHARE_BYTES = 2 << 20
"""What one rank may send another in one trip: 1,024 blocks, which an H200 (132 multiprocessors, 64
registers a thread at 8 ranks) runs all at once. Each of N ranks takes 8 N times as much memory."""
MAX_ROWS = 1024  # that `add_norm` sends in one trip
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


class _Rooms:
    """A part of the shared memory, in which calls take turns: see `all_reduce.cu`."""

    def __init__(self, library: Any, info: DistributedInfo, capacity: int, num_turns: int) -> None:
        """capacity: packs that a rank may send another in one trip. num_turns: blocks, at most."""
        self._library, self._info, self._capacity = library, info, capacity
        size = 4 * info.size * capacity * PACK_BYTES + num_turns * 4
        self._memory = library.memory_allocate(size, EMPTY)
        self._opened: list[int] = []
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
        fields = (*addresses, self._info.rank, self._capacity)
        self.ranks = (ctypes.c_int64 * len(fields))(*fields)  # struct Ranks

    def close(self) -> None:
        for address in self._opened:
            self._library.memory_close(address)
        self._library.memory_free(self._memory)


class PeerAllReduce:
    """This rank's memory and its view of the others'. Mutable: the memory, until it is closed."""

    def __init__(
        self, info: DistributedInfo, device: torch.device, library: Any, share_bytes: int
    ) -> None:
        """Raises JitUnavailable or RuntimeError where this cannot work."""
        self._info, self._library = info, library
        cubin = library.cubin_load(all_reduce_cubin(device, info.size))
        self._kernels = {
            (algorithm, dtype): library.cubin_kernel(cubin, f"{algorithm}_{name}")
            for algorithm in (*ALGORITHMS, *(f"add_norm_{x}" for x in ALGORITHMS))
            for dtype, name in TYPES.items()
        }
        self._dependent = torch.cuda.get_device_capability(device) >= (9, 0)
        self._capacity = share_bytes // PACK_BYTES
        self._row_packs = 0  # of the rows of all calls; the first decides
        num_blocks = -(-self._capacity // THREADS)
        self._sums = _Rooms(library, info, self._capacity, num_blocks)
        self._rows = _Rooms(library, info, self._capacity, MAX_ROWS)
        torch.cuda.synchronize(device)  # all of it is EMPTY before another rank can write

    @property
    def handle(self) -> bytes:
        return self._sums.handle + self._rows.handle

    def connect(self, handles: list[bytes]) -> None:
        """Open the others' memory. Raises RuntimeError where a GPU cannot reach another's."""
        self._sums.connect([handle[: len(handle) // 2] for handle in handles])
        self._rows.connect([handle[len(handle) // 2 :] for handle in handles])

    def algorithm(self, x: Tensor) -> str | None:
        """What sums tensors like this one fastest here; None where NCCL should."""
        if x.dtype not in TYPES:
            return None
        return choose_algorithm(x.nbytes, self._info.size, self._capacity * PACK_BYTES)

    def all_reduce(self, x: Tensor, algorithm: str) -> Tensor:
        """The sum, in place where `x` is contiguous and aligned."""
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
        """What `add_norm` takes for such rows; None where it cannot or NCCL should sum."""
        num_rows, size = x_TD.shape
        algorithm = self.algorithm(x_TD)
        packs = size * x_TD.itemsize // PACK_BYTES
        if algorithm is None or size * x_TD.itemsize % PACK_BYTES:
            return None
        if num_rows == 1 and algorithm == "two_shot":
            return None  # the first rank's share would be taken for all rows
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
        """See `DistributedCommunicator.add_norm`; in place, where the arguments are contiguous and
        aligned. Of the residual, two_shot gives this rank's share."""
        x_TD, weight = _aligned(x_TD), _aligned(weight)
        count, packs = len(x_TD), x_TD.shape[1] * x_TD.itemsize // PACK_BYTES
        has_residual = residual_TD is not None
        if residual_TD is None:
            residual_TD = torch.empty_like(x_TD)
        if algorithm == "two_shot":
            residual_TD = self._info.share_of(residual_TD, count)
        residual_TD = _aligned(residual_TD)
        self._row_packs = packs
        rows = Rows(
            x_TD.data_ptr(), residual_TD.data_ptr(), weight.data_ptr(), count, packs,
            has_residual, eps,
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
        """What was enqueued is done: nobody writes here any more."""
        self._sums.close()
        self._rows.close()


def _aligned(x: Tensor) -> Tensor:
    x = x.contiguous()
    return x.clone() if x.data_ptr() % PACK_BYTES else x


def connect_peers(
    host: GlooCommunicator, device: torch.device, library: Any, share_bytes: int = MAX_SHARE_BYTES
) -> PeerAllReduce | None:
    """All ranks', or None on all ranks, with one log line that says why."""
    return connect(
        host,
        lambda: PeerAllReduce(host.info, device, library, share_bytes),
        otherwise="NCCL does all sums, none go through shared memory",
    )
