"""Embedding and LM head, both split over ranks by vocabulary (Megatron-LM, 2019).

::

    vocabulary   |== rank 0 ==|== rank 1 ==|== rank 2 =|- -|     padded to equal shares
                 0                              vocab_size

Axes: T tokens, S rows that sample, V vocabulary, D hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from minisgl.layers.base import BaseOP, BuildContext, StateLessOP
from minisgl.layers.shard import vocab_rows, vocab_share
from minisgl.quantization import Part

if TYPE_CHECKING:
    from minisgl.quantization.weight import Target


class _VocabShare(BaseOP):
    """The rows of a [V, D] table that this rank holds, which may be padded."""

    target: Target = "Linear"

    def __init__(
        self,
        build: BuildContext,
        *,
        vocab_size: int,
        hidden_size: int,
        name: str,
        alias: str | None = None,
    ) -> None:
        super().__init__()
        self.ops, self.comm = build.ops, build.comm
        self.vocab_size = vocab_size
        rows = vocab_rows(vocab_size, self.comm.size)
        self.share = vocab_share(vocab_size, self.comm.size, self.comm.rank)
        part = Part(
            name=name, shape=(vocab_size, hidden_size), axis=0, share=self.share, alias=alias
        )
        self.weight = build.weight(part, target=self.target, rows=rows)


class VocabParallelEmbedding(_VocabShare):
    """int ids [T] -> this rank's partial sum [T, D]: zeros for ids of other ranks' shares."""

    target: Target = "Embedding"

    def forward(self, ids_T: Tensor) -> Tensor:
        return self.weight.rows(ids_T, self.share if self.comm.size > 1 else None)


class ParallelLMHead(StateLessOP):
    """[S, D] -> float32 logits [S, V] (see `Ops.logits`). table: its weight; the embedding if
    tied."""

    def __init__(self, table: _VocabShare) -> None:
        super().__init__()
        self.table = table

    @classmethod
    def untied(
        cls, build: BuildContext, *, vocab_size: int, hidden_size: int, name: str
    ) -> ParallelLMHead:
        """Return an LM head with its own table."""
        return cls(_VocabShare(build, vocab_size=vocab_size, hidden_size=hidden_size, name=name))

    def forward(self, x_SD: Tensor, own_rows: bool = False) -> Tensor:
        """own_rows: return only this rank's share of the rows
        (`DistributedCommunicator.shares_rows`)."""
        table = self.table
        columns = table.weight.logits(x_SD)
        comm = table.comm
        whole = comm.exchange(columns) if own_rows else comm.all_gather(columns, dim=-1)
        return whole[:, : table.vocab_size]
