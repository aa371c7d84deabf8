"""The collectives that tensor parallelism needs, as one small protocol.

A layer calls them without asking how many ranks there are: one rank answers each with its
argument. Where they are called is Megatron-LM's idea (Shoeybi et al. 2019, section 3).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class DistributedInfo:
    """This process is `rank` of `size`, counted from 0."""

    rank: int
    size: int

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size, f"rank {self.rank} of {self.size}"


class DistributedCommunicator(ABC):
    """Collectives between the ranks; every rank must make the same calls in the same order.

    Tensors have one shape and dtype on every rank: that is trusted. A call may work in place, so
    the caller uses what it returns and forgets what it gave. On a GPU the calls are enqueued on
    torch's current stream. A rank that is gone makes `EngineError` of every call that waits on the
    host; on a GPU, what is enqueued may never end, and who supervises the ranks has to end them.
    """

    def __init__(self, info: DistributedInfo) -> None:
        self.info = info
        self.rank = info.rank
        self.size = info.size

    @abstractmethod
    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's `x`, on each rank; the same bits on each."""

    @abstractmethod
    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """Every rank's `x`, one after another along `dim`, on each rank."""

    @abstractmethod
    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """The `x` of rank `source`, on each rank."""

    @abstractmethod
    def all_min(self, value: int) -> int:
        """The smallest of every rank's `value`, on each rank. A number of the host: it waits."""

    def close(self) -> None:  # noqa: B027 - one that holds nothing needs none
        """Let go of connections and memory; no call may follow."""


class SingleRank(DistributedCommunicator):
    """One rank: every collective is its argument."""

    def __init__(self) -> None:
        super().__init__(DistributedInfo(0, 1))

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return x

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        return x

    def all_min(self, value: int) -> int:
        return value


def join_gathered(gathered: Tensor, dim: int) -> Tensor:
    """[ranks, *shape] -> the ranks' tensors one after another along `dim` of `shape`."""
    dim %= gathered.dim() - 1
    return gathered.movedim(0, dim).flatten(dim, dim + 1)
