"""The collectives of tensor parallelism, as one small protocol.

A layer calls them without asking for the number of ranks: on one rank each returns its argument.
The places of the calls are Megatron-LM's (Shoeybi et al. 2019, section 3).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from minisgl.kernel.ops import Ops


ROW_UNIT = 4
"""A rank's share of the rows that sample is a multiple of this: 4 numbers of 4 bytes are 16 bytes,
the alignment of vector loads."""


@dataclass(frozen=True, slots=True)
class DistributedInfo:
    """This process is `rank` of `size`, counted from 0."""

    rank: int
    size: int

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size, f"rank {self.rank} of {self.size}"

    def share(self, num_rows: int) -> range:
        """Return this rank's share of the rows. Shares are equal, but the last ones may be
        smaller."""
        most = -(-num_rows // self.size)
        return range(num_rows)[self.rank * most : (self.rank + 1) * most]


class DistributedCommunicator(ABC):
    """Collectives between the ranks; every rank must make the same calls in the same order.

    Tensors must have the same shape and dtype on every rank; this is trusted. A call may overwrite
    its argument, so the caller must use the returned tensor. On a GPU the calls are enqueued on
    torch's current stream. If a rank is gone, every call that waits on the host raises `PeerLost`;
    enqueued GPU work may then never end, so the ranks' supervisor must end their processes.
    """

    def __init__(self, info: DistributedInfo) -> None:
        self.info = info
        self.rank = info.rank
        self.size = info.size

    @abstractmethod
    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of every rank's `x`, with the same bits on each rank."""

    @abstractmethod
    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """Return every rank's `x`, one after another along `dim`."""

    @abstractmethod
    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """Return the `x` of rank `source`."""

    def shares_rows(self, num_rows: int) -> bool:
        """Return whether each rank samples only its share of `num_rows` rows."""
        is_multiple = num_rows % (self.size * ROW_UNIT) == 0
        return self.size > 1 and num_rows > 0 and is_multiple

    @abstractmethod
    def exchange(self, x_SV: Tensor) -> Tensor:
        """All-to-all: each rank gives its columns of all rows, [S, V], and gets all columns of its
        share of the rows, [S / size, size * V]. S is a positive multiple of the size."""

    def add_norm(
        self,
        ops: Ops,
        x_TD: Tensor,
        residual_TD: Tensor | None,
        weight: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        """All-reduce x, then `Ops.add_rms_norm`; `Ops.rms_norm` if there is no residual.

        Returns (normed, residual). The returned residual may hold only this rank's share of the
        rows. Pass it on to the next call with the same number of rows, or to `take_rows`.
        """
        x_TD = self.all_reduce(x_TD)
        if residual_TD is None:
            return ops.rms_norm(x_TD, weight, eps), x_TD
        assert residual_TD.shape == x_TD.shape
        return ops.add_rms_norm(x_TD, residual_TD, weight, eps)

    def take_rows(self, residual: Tensor, rows_S: Tensor, num_rows: int) -> Tensor:
        """Return the rows rows_S of a residual, [S, D], on each rank. residual: the output of
        `add_norm` for `num_rows` rows."""
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
        """Return the smallest of the ranks' values. It is a host number, so the call waits."""

    def close(self) -> None:  # noqa: B027 - a communicator without resources
        """Release connections and memory. No call may follow."""


class SingleRank(DistributedCommunicator):
    """One rank: every collective returns its argument."""

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
