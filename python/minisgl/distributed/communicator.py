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

    from minisgl.kernel.ops import Ops


SHARED_ROWS = 4
"""A rank's share of the rows that sample is a multiple of so many: 4 numbers of 4 bytes are 16
bytes, to which kernels want what they read of the rows aligned."""


@dataclass(frozen=True, slots=True)
class DistributedInfo:
    """This process is `rank` of `size`, counted from 0."""

    rank: int
    size: int

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size, f"rank {self.rank} of {self.size}"

    def share(self, num_rows: int) -> range:
        """Which of so many rows are this rank's: as many for each, but fewer for the last ones."""
        most = -(-num_rows // self.size)
        return range(num_rows)[self.rank * most : (self.rank + 1) * most]

    def share_of(self, x: Tensor, num_rows: int) -> Tensor:
        """This rank's share of `num_rows` rows: of x that has them all, or else x."""
        if len(x) != num_rows:
            return x
        share = self.share(num_rows)
        return x[share.start : share.stop]


class PendingSum(ABC):
    """A sum over the ranks that was begun.

    Until it is waited for nobody may write its part, and no other collective may be enqueued than
    one more such sum: its kernels could hold the multiprocessors that another rank's sum needs.
    """

    @abstractmethod
    def wait(self) -> Tensor:
        """The sum, on each rank, for what is enqueued after this on the stream that began it; good
        until the next but one is begun."""


class MadeSum(PendingSum):
    """One that is made."""

    def __init__(self, total: Tensor) -> None:
        self._total = total

    def wait(self) -> Tensor:
        return self._total


class DistributedCommunicator(ABC):
    """Collectives between the ranks; every rank must make the same calls in the same order.

    Tensors have one shape and dtype on every rank: that is trusted. A call may work in place, so
    the caller uses what it returns and forgets what it gave. On a GPU the calls are enqueued on
    torch's current stream. A rank that is gone makes `PeerLost` of every call that waits on the
    host; on a GPU, what is enqueued may never end, and who supervises the ranks has to end them.

    halve_from: in steps of how many rows `halves` gives two, where it `can_halve`; whoever sets it
    sets the same on every rank.
    """

    def __init__(self, info: DistributedInfo) -> None:
        self.info = info
        self.rank = info.rank
        self.size = info.size
        self.can_halve = False
        self.halve_from: int | None = None

    @abstractmethod
    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's `x`, on each rank; the same bits on each."""

    @abstractmethod
    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """Every rank's `x`, one after another along `dim`, on each rank."""

    @abstractmethod
    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """The `x` of rank `source`, on each rank."""

    def shares_rows(self, num_rows: int) -> bool:
        """Whether each rank samples its share of so many rows, and not all of them."""
        is_multiple = num_rows % (self.size * SHARED_ROWS) == 0
        return self.size > 1 and num_rows > 0 and is_multiple

    @abstractmethod
    def exchange(self, x_SV: Tensor) -> Tensor:
        """From each rank's columns of all rows to [S / size, size * V], all ranks' columns of this
        rank's share of the rows. S: a multiple of the size, not 0."""

    def reserve(self, num_rows: int, row_bytes: int) -> None:  # noqa: B027 - most need none
        """Take memory to halve steps of up to so many rows; `can_halve` says whether there is."""

    def halves(self, num_rows: int, row_bytes: int) -> list[int]:
        """How many rows to compute at a time, so that the sum of some can run beside the products
        of others: all, or two halves, which each begin a sum, one after the other."""
        return [num_rows]

    def begin_sum(self, x_TD: Tensor) -> PendingSum:
        """Begin the sum of one of `halves`, for `add_norm`."""
        return MadeSum(self.all_reduce(x_TD))

    def add_norm(
        self,
        ops: Ops,
        x_TD: Tensor | PendingSum,
        residual_TD: Tensor | None,
        weight: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        """`Ops.add_rms_norm` of the ranks' sum of x; without a residual, `Ops.rms_norm`.

        The residual that comes back may be this rank's share of the rows alone, which is then for
        the next call, of as many rows, and for `take_rows`; with a sum that was begun it is not.
        """
        x_TD = x_TD.wait() if isinstance(x_TD, PendingSum) else self.all_reduce(x_TD)
        assert residual_TD is None or residual_TD.shape == x_TD.shape
        if residual_TD is None:
            return ops.rms_norm(x_TD, weight, eps), x_TD
        return ops.add_rms_norm(x_TD, residual_TD, weight, eps)

    def take_rows(self, residual: Tensor, rows_S: Tensor, num_rows: int) -> Tensor:
        """residual[rows], [S, D], on each rank, of what `add_norm` gave of `num_rows` rows."""
        if len(residual) == num_rows:
            return residual[rows_S]
        share = self.info.share(num_rows)
        taken_SD = residual.new_zeros(len(rows_S), residual.shape[1])
        if share:
            is_here_S = (rows_S >= share.start) & (rows_S < share.stop)
            at_S = (rows_S - share.start).clamp(0, len(share) - 1)
            taken_SD = residual[at_S].masked_fill(~is_here_S[:, None], 0)
        return self.all_reduce(taken_SD)

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

    def exchange(self, x_SV: Tensor) -> Tensor:
        return x_SV

    def all_min(self, value: int) -> int:
        return value


def room_to_exchange(x_SV: Tensor, size: int) -> Tensor:
    """For what `exchange` receives of each rank, not filled yet: [size, S / size, V]."""
    num_rows, num_columns = x_SV.shape
    assert 0 < num_rows == num_rows // size * size, f"{num_rows} rows for {size} ranks"
    return x_SV.new_empty(size, num_rows // size, num_columns)


def join_gathered(gathered: Tensor, dim: int) -> Tensor:
    """[ranks, *shape] -> the ranks' tensors one after another along `dim` of `shape`."""
    dim %= gathered.dim() - 1
    return gathered.movedim(0, dim).flatten(dim, dim + 1)
