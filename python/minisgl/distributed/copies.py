"""All-reduce of many rows by the GPUs' copy engines, beside the products of other rows.

NCCL's kernels take multiprocessors from the product that they run beside, which then loses what the
sum gains. Here the engines copy, on a stream of their own, and the stream waits for words that the
others write into memory. Multiprocessors are needed for the adding up alone, a short kernel between
two products.

Rank r sums the r-th share of the rows and copies the sum to each. A rank's memory, opened by the
others as in `minisgl.distributed.peer`, for each of two turns, which sums take alternately:

  words    how many sums' parts (phase 0) and totals (phase 1) have come, from each sender
  total    [rows, D]
  parts    [ranks, share of the rows, D], what the others have for this rank to sum

Why nothing is overwritten too early: a rank sends its parts for the next sum of a turn when it has
used the total before, for which it heard from every rank; and a rank sends its share of a total
when it has read the parts of it.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minisgl.distributed.communicator import DistributedInfo, PendingSum
from minisgl.kernel.all_reduce import PACK_BYTES, THREADS, TYPES, all_reduce_cubin

_cuda: Any = torch.cuda  # whose stubs lack types

NUM_TURNS = 2
TILE_ROWS = 256  # of a large product
ADD_BLOCKS = 264
"""Two for each of an H200's multiprocessors; not tuned."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """Offsets into a rank's memory, in bytes. total, share: of the rows of one sum, at most."""

    ranks: int
    total: int
    share: int

    @property
    def size(self) -> int:
        return self.parts(NUM_TURNS, 0)

    def word(self, turn: int, phase: int, sender: int) -> int:
        """In turn NUM_TURNS there is one more for each sender, to try."""
        return ((turn * 2 + phase) * self.ranks + sender) * 4

    def sums(self, turn: int) -> int:
        return _aligned(self.word(NUM_TURNS, 1, 0)) + turn * self.total

    def parts(self, turn: int, sender: int) -> int:
        return self.sums(NUM_TURNS) + (turn * self.ranks + sender) * self.share


class _DriverMemory:
    """What torch makes a tensor of: the CUDA array interface of memory that is not torch's."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class _CopiedSum(PendingSum):
    def __init__(self, part: Tensor, total: Tensor, done: torch.cuda.Event) -> None:
        """part: kept, or torch would give its memory to others while it is copied."""
        self._part, self._total, self._done = part, total, done

    def wait(self) -> Tensor:
        torch.cuda.current_stream().wait_event(self._done)
        return self._total


class CopySums:
    """This rank's memory and its view of the others'. Mutable: the memory, turns and counts."""

    def __init__(
        self,
        info: DistributedInfo,
        device: torch.device,
        library: Any,
        *,
        max_rows: int,
        row_bytes: int,
    ) -> None:
        """max_rows: of one sum. Raises JitUnavailable or RuntimeError where this cannot work."""
        self._info, self._library, self._row_bytes = info, library, row_bytes
        self._max_rows = max_rows
        cubin = library.cubin_load(all_reduce_cubin(device, info.size))
        self._kernels = {
            dtype: library.cubin_kernel(cubin, f"add_up_{name}") for dtype, name in TYPES.items()
        }
        total = _aligned(max_rows * row_bytes)
        self._layout = _Layout(info.size, total, _aligned(-(-max_rows // info.size) * row_bytes))
        self._stream = _cuda.Stream(device, priority=-1)
        self._turn, self._count = 0, 0
        self._memory = library.memory_allocate(self._layout.size, 0)
        self._addresses = [self._memory] * info.size
        self.handle: bytes = bytes(library.memory_handle(self._memory))
        self._totals = [
            torch.as_tensor(
                _DriverMemory(self._memory + self._layout.sums(turn), total), device=device
            )
            for turn in range(NUM_TURNS)
        ]
        torch.cuda.synchronize(device)  # the words are 0 before another rank can write

    @property
    def num_bytes(self) -> int:
        return self._layout.size

    def connect(self, handles: list[bytes]) -> None:
        """Open the others' memory. Raises RuntimeError where a GPU cannot reach another's, or
        streams cannot write and wait for words."""
        for rank, handle in enumerate(handles):
            if rank != self._info.rank:
                self._addresses[rank] = self._library.memory_open(handle)
            word = self._layout.word(NUM_TURNS, 0, self._info.rank)
            self._library.stream_write(self._addresses[rank] + word, 1, self._stream.cuda_stream)
            if rank == self._info.rank:
                self._library.stream_wait(self._memory + word, 1, self._stream.cuda_stream)
        self._stream.synchronize()

    @staticmethod
    def split(num_rows: int) -> list[int]:
        """Two halves; the first fills the tiles of products."""
        first = -(-num_rows // (2 * TILE_ROWS)) * TILE_ROWS
        return [first, num_rows - first]

    def halves(self, num_rows: int, row_bytes: int) -> list[int]:
        """See `DistributedCommunicator.halves`."""
        first, second = self.split(num_rows)
        fit = row_bytes == self._row_bytes and first <= self._max_rows and second > 0
        return [first, second] if fit else [num_rows]

    def begin(self, x_TD: Tensor) -> PendingSum:
        """Of at most `max_rows` rows, which nobody may write before the sum is waited for."""
        assert x_TD.is_contiguous()
        assert len(x_TD) <= self._max_rows
        assert x_TD.shape[1] * x_TD.itemsize == self._row_bytes
        turn, self._turn = self._turn, (self._turn + 1) % NUM_TURNS
        self._count += turn == 0
        stream, rank, layout = self._stream, self._info.rank, self._layout
        stream.wait_stream(torch.cuda.current_stream())
        size = self._info.size
        others = [(rank + step) % size for step in range(1, size)]
        shares = [DistributedInfo(r, size).share(len(x_TD)) for r in range(size)]
        total, x = self._memory + layout.sums(turn), x_TD.data_ptr()
        for other in others:
            to = self._addresses[other] + layout.parts(turn, rank)
            self._copy(to, x + shares[other].start * self._row_bytes, shares[other], stream)
            self._tell(other, turn, 0, stream)
        self._hear(others, turn, 0, stream)
        mine = shares[rank]
        self._add_up(total, x, turn, mine, x_TD.dtype, stream)
        offset = mine.start * self._row_bytes
        for other in others:
            to = self._addresses[other] + layout.sums(turn) + offset
            self._copy(to, total + offset, mine, stream)
            self._tell(other, turn, 1, stream)
        self._hear(others, turn, 1, stream)
        done = _cuda.Event()
        done.record(stream)
        sums = self._totals[turn][: x_TD.nbytes].view(x_TD.dtype).view(x_TD.shape)
        return _CopiedSum(x_TD, sums, done)

    def _copy(self, to: int, source: int, rows: range, stream: torch.cuda.Stream) -> None:
        if rows:
            num_bytes = len(rows) * self._row_bytes
            self._library.memory_copy(to, source, num_bytes, stream.cuda_stream)

    def _tell(self, other: int, turn: int, phase: int, stream: torch.cuda.Stream) -> None:
        word = self._addresses[other] + self._layout.word(turn, phase, self._info.rank)
        self._library.stream_write(word, self._count, stream.cuda_stream)

    def _hear(self, others: list[int], turn: int, phase: int, stream: torch.cuda.Stream) -> None:
        for other in others:
            word = self._memory + self._layout.word(turn, phase, other)
            self._library.stream_wait(word, self._count, stream.cuda_stream)

    def _add_up(
        self, total: int, x: int, turn: int, rows: range, dtype: torch.dtype, stream: Any
    ) -> None:
        """The parts of this rank's share of the rows."""
        if not rows:
            return
        offset = rows.start * self._row_bytes
        packs = len(rows) * self._row_bytes // PACK_BYTES
        parts = self._memory + self._layout.parts(turn, 0)
        stride, rank = self._layout.share // PACK_BYTES, self._info.rank
        fields = (ctypes.c_int64 * 6)(total + offset, x + offset, parts, packs, stride, rank)
        at = ctypes.addressof(fields)
        parameters = (ctypes.c_int64 * 6)(*range(at, at + 48, 8))
        blocks = min(-(-packs // THREADS), ADD_BLOCKS)
        self._library.kernel_launch(
            self._kernels[dtype], blocks, THREADS, 0, 1,
            ctypes.addressof(parameters), False, stream.cuda_stream,
        )  # fmt: skip

    def close(self) -> None:
        """What was enqueued is done: nobody writes here any more."""
        self._totals.clear()
        for address in self._addresses:
            if address != self._memory:
                self._library.memory_close(address)
        self._library.memory_free(self._memory)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 256) * 256
