"""Linear layers, split over ranks by columns (outputs) or rows (inputs) as in Megatron-LM (2019).

A column-parallel layer's output is this rank's share; a row-parallel layer takes such a share and
sums over the ranks, so a pair of them (q/k/v then o, gate/up then down) costs one all-reduce.
Weights are [out, in], as checkpoints have them.

Axes: T tokens, D hidden size, F intermediate size, N query heads, K key/value heads, H head dim.
"""

from __future__ import annotations

from torch import Tensor

from minisgl.errors import ConfigError
from minisgl.layers.base import BaseOP, BuildContext, Part
from minisgl.layers.norm import RMSNormFused


class _Linear(BaseOP):
    """`names` are checkpoint names without ".weight" and ".bias"."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, build: BuildContext) -> None:
        super().__init__()
        self.ops, self.comm, self.dtype = build.ops, build.comm, build.dtype
        self.bias = None

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.linear(x, self.weight, self.bias)

    def forward_normed(
        self, norm: RMSNormFused, x: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(forward(norm(x + residual)), x + residual): together where that is one kernel."""
        return self.ops.norm_linear(x, residual, norm.weight, norm.eps, self.weight, self.bias)

    def _declare_merged(
        self, pieces: list[tuple[str, int, int, int]], in_size: int, bias: bool
    ) -> None:
        """pieces: (name, outputs in the checkpoint, which share of them is ours, of how many)."""
        weights, biases = [], []
        for name, size, index, count in pieces:
            weight = Part.shard(f"{name}.weight", size, in_size, axis=0, index=index, count=count)
            weights.append(weight)
            biases.append(Part.shard(f"{name}.bias", size, axis=0, index=index, count=count))
        self.declare("weight", self.dtype, *weights)
        if bias:
            self.declare("bias", self.dtype, *biases)


class LinearColParallelMerged(_Linear):
    """Several linear layers of one input as one product: [T, D] -> their shares side by side."""

    def __init__(
        self,
        build: BuildContext,
        *,
        in_size: int,
        out_size: int,
        bias: bool,
        names: tuple[str, ...],
    ) -> None:
        super().__init__(build)
        build.share(out_size, "outputs of a linear layer")
        pieces = [(name, out_size, self.comm.rank, self.comm.size) for name in names]
        self._declare_merged(pieces, in_size, bias)


class LinearQKVMerged(_Linear):
    """Queries, keys and values as one product: [T, D] -> [T, (N + 2K) * H] with local N and K.

    Where there are more ranks than key/value heads, neighbours hold the same head.
    """

    def __init__(
        self,
        build: BuildContext,
        *,
        in_size: int,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool,
        names: tuple[str, str, str],
    ) -> None:
        super().__init__(build)
        rank, size = self.comm.rank, self.comm.size
        self.num_q_heads = build.share(num_q_heads, "query heads")
        self.num_kv_heads = local_kv_heads(num_kv_heads, size)
        q_name, *kv_names = names
        shards = min(size, num_kv_heads)
        pieces = [(q_name, num_q_heads * head_dim, rank, size)]
        for name in kv_names:
            pieces.append((name, num_kv_heads * head_dim, rank * shards // size, shards))
        self._declare_merged(pieces, in_size, bias)


class LinearRowParallel(_Linear):
    """[T, this rank's share of the inputs] -> [T, D], summed over the ranks."""

    def __init__(
        self, build: BuildContext, *, in_size: int, out_size: int, bias: bool, name: str
    ) -> None:
        super().__init__(build)
        build.share(in_size, "inputs of a linear layer")
        rank, size = self.comm.rank, self.comm.size
        weight = Part.shard(f"{name}.weight", out_size, in_size, axis=1, index=rank, count=size)
        self.declare("weight", self.dtype, weight)
        if bias:
            self.declare("bias", self.dtype, Part.whole(f"{name}.bias", out_size))

    def forward(self, x: Tensor) -> Tensor:
        # The bias must enter the sum once.
        bias = self.bias if self.comm.rank == 0 else None
        return self.comm.all_reduce(self.ops.linear(x, self.weight, bias))


def local_kv_heads(num_kv_heads: int, num_ranks: int) -> int:
    """How many key/value heads each rank holds, at least one. Raises ConfigError if uneven."""
    if max(num_kv_heads, num_ranks) % min(num_kv_heads, num_ranks):
        raise ConfigError(
            f"{num_kv_heads} key/value heads cannot be shared by {num_ranks} ranks; "
            "one number must divide the other"
        )
    return max(num_kv_heads // num_ranks, 1)
