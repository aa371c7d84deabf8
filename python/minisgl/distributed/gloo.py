"""The collectives of CPU tensors, over gloo. Ranks with GPUs use them between their hosts.

Gloo is part of every torch. The constructor connects each pair of ranks over TCP. When a rank dies,
its connections close, so the calls of the others fail at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch
from torch import Tensor

from minisgl import plugins
from minisgl.distributed.communicator import DistributedCommunicator, DistributedInfo
from minisgl.errors import ConfigError, PeerLost
from minisgl.utils.logger import get_logger

logger = get_logger(__name__)

_dist: Any = torch.distributed  # whose stubs lack most of what a group is built of

TIMEOUT: Final = timedelta(seconds=300)
"""How long a rank waits for another one that loads weights or compiles kernels. A rank that died is
noticed at once, by its closed connection."""

LOOPBACK: Final = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the ranks meet: torch's store, and this machine's address as the other ranks reach it.

    The process groups are built on this store. The global group of the user's program
    (`torch.distributed.init_process_group`) is not used or changed.
    """

    store: Any
    address: str


def meet(info: DistributedInfo, url: str) -> Rendezvous:
    """Open the store at `url`: file:///PATH, a file that all ranks can open and that must not exist
    before, or tcp://HOST:PORT, which the row `tcp` of `nodes` opens. Raises ConfigError, PeerLost.
    """
    if url.startswith("file:///"):  # not parsed further: a path may contain any character
        store = _dist.FileStore(url.removeprefix("file://"), info.size)
        store.set_timeout(TIMEOUT)
        return Rendezvous(store, LOOPBACK)
    if not url.startswith("tcp://"):
        raise no_meeting_place(url)
    met: Rendezvous = plugins.need("nodes", "tcp", url)(info, url)
    return met


def no_meeting_place(url: str) -> ConfigError:
    """Return the error for a URL of another form."""
    return ConfigError(f"ranks meet at file:///PATH or tcp://HOST:PORT, not at {url!r}")


class GlooCommunicator(DistributedCommunicator):
    """Only one thread may call it at a time; not necessarily the thread that built it."""

    def __init__(self, info: DistributedInfo, rendezvous: Rendezvous) -> None:
        super().__init__(info)
        options = _dist.ProcessGroupGloo._Options()
        options._devices = [_dist.ProcessGroupGloo.create_device(hostname=rendezvous.address)]
        options._timeout = TIMEOUT
        self.store = rendezvous.store  # rank 0's serves the others as long as it lives
        with self._errors_named("the ranks cannot connect"):
            self._group = _dist.ProcessGroupGloo(
                _dist.PrefixStore("gloo", self.store), info.rank, info.size, options
            )

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._reduce(x.contiguous(), _dist.ReduceOp.SUM)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        gathered = x.new_empty(self.size, *x.shape)
        rows = [_bytes_of(row) for row in gathered]
        with self._errors_named():
            self._group.allgather([rows], [_bytes_of(x.contiguous())]).wait()
        return join_gathered(gathered, dim)

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        x = x.contiguous()
        options = _dist.BroadcastOptions()
        options.rootRank = source
        with self._errors_named():
            self._group.broadcast([_bytes_of(x)], options).wait()
        return x

    def exchange(self, x_SV: Tensor) -> Tensor:
        gathered = room_to_exchange(x_SV, self.size)
        with self._errors_named():
            self._group.alltoall_base(
                _bytes_of(gathered), _bytes_of(x_SV.contiguous()), [], [], _dist.AllToAllOptions()
            ).wait()
        return join_gathered(gathered, -1)

    def all_min(self, value: int) -> int:
        return int(self._reduce(torch.tensor([value]), _dist.ReduceOp.MIN).item())

    def _reduce(self, x: Tensor, op: Any) -> Tensor:
        options = _dist.AllreduceOptions()
        options.reduceOp = op
        with self._errors_named():
            self._group.allreduce([x], options).wait()
        return x

    def close(self) -> None:
        del self._group, self.store

    @contextmanager
    def _errors_named(self, what: str = "a collective failed") -> Iterator[None]:
        """Raise PeerLost for an error of gloo, whose own text is logged."""
        try:
            yield
        except RuntimeError as error:
            logger.info("gloo says: %s", error)
            raise PeerLost(
                f"rank {self.rank} of {self.size}: {what}, most likely because another rank has "
                f"ended or was silent for {TIMEOUT.total_seconds():.0f} s; gloo's own message "
                "is in the log, at level info"
            ) from error


def _bytes_of(x: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as bytes, because gloo does not move every dtype."""
    return x.view(-1).view(torch.uint8)


def room_to_exchange(x_SV: Tensor, size: int) -> Tensor:
    """Return an empty tensor for the parts that `exchange` receives: [size, S / size, V]."""
    num_rows, num_columns = x_SV.shape
    assert 0 < num_rows == num_rows // size * size, f"{num_rows} rows for {size} ranks"
    return x_SV.new_empty(size, num_rows // size, num_columns)


def join_gathered(gathered: Tensor, dim: int) -> Tensor:
    """[ranks, *shape] -> the ranks' tensors one after another along `dim` of `shape`."""
    dim %= gathered.dim() - 1
    return gathered.movedim(0, dim).flatten(dim, dim + 1)
