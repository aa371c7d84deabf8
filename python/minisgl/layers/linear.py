"""Linear layers, split over ranks by columns (outputs) or rows (inputs) as in Megatron-LM (2019).

A column-parallel layer's output is this rank's share; a row-parallel layer takes such a share and
gives a part of a sum over the ranks, which the norm after it takes: a pair of them (q/k/v then o,
gate/up then down) costs one all-reduce.
Weights are [out, in], as checkpoints have them.

Axes: T tokens, D hidden size, F intermediate size, N query heads, K key/value heads, H head dim.
"""

from __future__ import annotations

from torch import Tensor

from minisgl.kernel.ops import Activation
from minisgl.layers.base import BaseOP, BuildContext, Part
from minisgl.layers.norm import RMSNormFused
from minisgl.layers.shard import split_heads, times


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
        self,
        norm: RMSNormFused,
        x: Tensor,
        residual: Tensor | None,
        gate: Activation | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Apply norm, then the projection, then the gated activation. Returns (output, residual).

        One rank does this as one op. Several ranks do it as two, since the norm all-reduces x.
        """
        if self.comm.size == 1:
            return self.ops.norm_linear(
                x, residual, norm.weight, norm.eps, self.weight, self.bias, gate
            )
        x, residual = norm.forward(x, residual)
        return self.ops.linear(x, self.weight, self.bias, gate), residual

    def _declare_merged(
        self, pieces: list[tuple[str, int, range]], in_size: int, bias: bool
    ) -> None:
        """pieces: (name, outputs in the checkpoint, this rank's share of them)."""

        def parts(kind: str, *inner: int) -> list[Part]:
            return [
                Part(name=f"{name}.{kind}", shape=(size, *inner), axis=0, share=share)
                for name, size, share in pieces
            ]

        self.declare("weight", self.dtype, *parts("weight", in_size))
        if bias:
            self.declare("bias", self.dtype, *parts("bias"))


class LinearColParallelMerged(_Linear):
    """Several linear layers of one input as one product: [T, D] -> their shares side by side.

    columns: this rank's share of each.
    """

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
        self.columns = build.columns(out_size)
        self._declare_merged([(name, out_size, self.columns) for name in names], in_size, bias)


class LinearQKVMerged(_Linear):
    """Queries, keys and values as one product: [T, D] -> [T, (N + 2K) * H] with local N and K.

    q_columns: this rank's share of the queries.
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
        heads = split_heads(num_q_heads, num_kv_heads, self.comm.size)[self.comm.rank]
        self.num_q_heads, self.num_kv_heads = len(heads.q), len(heads.kv)
        self.q_columns = times(heads.q, head_dim)
        q_name, k_name, v_name = names
        kv = (num_kv_heads * head_dim, times(heads.kv, head_dim))
        pieces = [(q_name, num_q_heads * head_dim, self.q_columns), (k_name, *kv), (v_name, *kv)]
        self._declare_merged(pieces, in_size, bias)


class LinearRowParallel(_Linear):
    """[T, `share` of the inputs] -> [T, D], this rank's part of the sum over the ranks.

    share: what this rank has of the `in_size` inputs, as the layer before gives them.
    """

    def __init__(
        self,
        build: BuildContext,
        *,
        in_size: int,
        share: range,
        out_size: int,
        bias: bool,
        name: str,
    ) -> None:
        super().__init__(build)
        weight = Part(name=f"{name}.weight", shape=(out_size, in_size), axis=1, share=share)
        self.declare("weight", self.dtype, weight)
        if bias:
            self.declare("bias", self.dtype, Part.whole(f"{name}.bias", out_size))

    def forward(self, x: Tensor) -> Tensor:
        # The bias must enter the sum once.
        bias = self.bias if self.comm.rank == 0 else None
        return self.ops.linear(x, self.weight, bias)
