"""Collectives of GPU tensors over NCCL, called directly or through torch's process group.

Both run on torch's current stream, can be captured in CUDA graphs, and use gloo between the hosts.
The direct calls save the events and records that a process group adds to each call, and send small
all-reduces through memory that the GPUs share (`PeerReduce`). They need a C++ compiler; without one
torch's process group is used.

Closing aborts the communicator and does not wait for other ranks. But an abort waits until all CUDA
graphs that captured its calls are freed (NCCL 2.26 and later), and the traceback of a failed rank
may still hold one. A failed rank must end all the same, so the wait has a limit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions  # torch.distributed leaves it out

from minisgl.distributed.communicator import DistributedCommunicator
from minisgl.distributed.gloo import TIMEOUT, GlooCommunicator, join_gathered, room_to_exchange
from minisgl.errors import PeerLost
from minisgl.kernel.ops import Ops

_dist: Any = torch.distributed  # its type stubs lack most of what follows

# ncclDataType_t (nccl.h)
_NCCL_DTYPES = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}


CLOSE_S = 1.0
"""How long closing waits for an abort. A server with a dead rank must end within 2 s. Aborting an
idle communicator takes much less than this."""


class _NcclCommunicator(DistributedCommunicator):
    """The common part of both: gloo between the hosts."""

    def __init__(self, host: GlooCommunicator) -> None:
        super().__init__(host.info)
        self._host = host

    def all_min(self, value: int) -> int:
        return self._host.all_min(value)

    def close(self) -> None:
        self._host.close()


class TorchNcclCommunicator(_NcclCommunicator):
    """torch's process group on our own store. It does not touch the program's global group."""

    def __init__(self, host: GlooCommunicator, device: torch.device) -> None:
        super().__init__(host)
        options = _dist.ProcessGroupNCCL.Options()
        options._timeout = TIMEOUT
        with _errors_named(self):
            self._group = _dist.ProcessGroupNCCL(
                _dist.PrefixStore("nccl", host.store), self.rank, self.size, options
            )
            # The group connects with its first collectives, which a graph must not capture.
            self.all_reduce(torch.zeros(1, device=device))
            self.exchange(torch.zeros(self.size, 1, device=device))
            torch.cuda.synchronize()

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        _finish(self._group.allreduce([x], _on_current_stream(_dist.AllreduceOptions())))
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        gathered = x.new_empty(self.size, *x.shape)
        options = _on_current_stream(AllgatherOptions())
        _finish(self._group._allgather_base(gathered, x.contiguous(), options))
        return join_gathered(gathered, dim)

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        x = x.contiguous()
        options = _on_current_stream(_dist.BroadcastOptions())
        options.rootRank = source
        _finish(self._group.broadcast([x], options))
        return x

    def exchange(self, x_SV: Tensor) -> Tensor:
        gathered = room_to_exchange(x_SV, self.size)
        options = _on_current_stream(_dist.AllToAllOptions())
        flat = gathered.view(len(x_SV), -1)
        _finish(self._group.alltoall_base(flat, x_SV.contiguous(), [], [], options))
        return join_gathered(gathered, -1)

    def close(self) -> None:
        _run_briefly(self._group.abort)
        super().close()


class PeerReduce(Protocol):
    """All-reduces of small tensors through memory that the GPUs share. The ranks choose the same
    algorithm, which depends only on dtype and size."""

    def algorithm(self, x: Tensor) -> str | None:
        """Return the algorithm for `all_reduce`; None if NCCL is faster."""

    def all_reduce(self, x: Tensor, algorithm: str) -> Tensor:
        """See `DistributedCommunicator.all_reduce`."""

    def row_algorithm(self, x_TD: Tensor) -> str | None:
        """Return the algorithm for `add_norm`; None if it cannot or NCCL is faster."""

    def add_norm(
        self,
        x_TD: Tensor,
        residual_TD: Tensor | None,
        weight: Tensor,
        eps: float,
        algorithm: str,
    ) -> tuple[Tensor, Tensor]:
        """See `DistributedCommunicator.add_norm`."""

    def close(self) -> None:
        """Close and free the memory. All enqueued calls must have ended."""


class PyNcclCommunicator(_NcclCommunicator):
    """Calls NCCL by `library` (`minisgl.kernel.jit.CUDA`). `peer` computes small all-reduces."""

    def __init__(self, host: GlooCommunicator, library: Any, peer: PeerReduce | None) -> None:
        super().__init__(host)
        self._library, self._peer = library, peer
        with _errors_named(self):
            unique_id = library.nccl_unique_id() if self.rank == 0 else bytes(128)
            of_rank_0 = host.broadcast(torch.frombuffer(bytearray(unique_id), dtype=torch.uint8))
            self._comm = library.nccl_init(of_rank_0.numpy().tobytes(), self.rank, self.size)
            # The first call connects each pair of ranks, which takes memory.
            self.exchange(torch.zeros(self.size, 1, device="cuda"))
            torch.cuda.synchronize()

    def all_reduce(self, x: Tensor) -> Tensor:
        if self._peer and (algorithm := self._peer.algorithm(x)):
            return self._peer.all_reduce(x, algorithm)
        x = x.contiguous()
        self._library.nccl_all_reduce(
            self._comm, x.data_ptr(), x.numel(), _NCCL_DTYPES[x.dtype], _stream()
        )
        return x

    def add_norm(
        self,
        ops: Ops,
        x_TD: Tensor,
        residual_TD: Tensor | None,
        weight: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        if self._peer and (algorithm := self._peer.row_algorithm(x_TD)):
            return self._peer.add_norm(x_TD, residual_TD, weight, eps, algorithm)
        return super().add_norm(ops, x_TD, residual_TD, weight, eps)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        x = x.contiguous()
        gathered = x.new_empty(self.size, *x.shape)
        self._library.nccl_all_gather(
            self._comm, x.data_ptr(), gathered.data_ptr(), x.nbytes, _stream()
        )
        return join_gathered(gathered, dim)

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        x = x.contiguous()
        self._library.nccl_broadcast(self._comm, x.data_ptr(), x.nbytes, source, _stream())
        return x

    def exchange(self, x_SV: Tensor) -> Tensor:
        x_SV = x_SV.contiguous()
        gathered = room_to_exchange(x_SV, self.size)
        self._library.nccl_exchange(
            self._comm, x_SV.data_ptr(), gathered.data_ptr(), x_SV.nbytes // self.size, self.size,
            _stream(),
        )  # fmt: skip
        return join_gathered(gathered, -1)

    def close(self) -> None:
        if self._peer:
            self._peer.close()
        _run_briefly(partial(self._library.nccl_abort, self._comm))
        super().close()


def _run_briefly(abort: Callable[[], object]) -> None:
    """Run the abort in a daemon thread and wait `CLOSE_S` for it."""
    thread = threading.Thread(target=abort, name="nccl-abort", daemon=True)
    thread.start()
    thread.join(CLOSE_S)


def _stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def _on_current_stream(options: Any) -> Any:
    options.asyncOp = False  # otherwise NCCL runs on the group's stream, between two events
    return options


def _finish(work: Any) -> None:
    """Order the current stream after the work. A group returns None if no wait is needed."""
    if work is not None:
        work.wait()


@contextmanager
def _errors_named(comm: DistributedCommunicator) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(
            f"rank {comm.rank} of {comm.size} cannot connect over NCCL: {error}"
        ) from error
