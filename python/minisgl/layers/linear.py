"""Linear layers, split over ranks by columns (outputs) or rows (inputs) as in Megatron-LM (2019).

A column-parallel layer returns this rank's share of the outputs. A row-parallel layer takes such a
share and returns this rank's partial sum, which the next norm all-reduces. So such a pair (q/k/v
and o, or gate/up and down) costs one all-reduce. Weights are [out, in], as in checkpoints.

Axes: T tokens, D hidden size, F intermediate size, N query heads, K key/value heads, H head dim.
"""

from __future__ import annotations

from torch import Tensor

from minisgl.kernel.ops import Activation
from minisgl.layers.base import BaseOP, BuildContext
from minisgl.layers.norm import RMSNormFused
from minisgl.layers.shard import split_heads, times
from minisgl.quantization import Part


class Linear(BaseOP):
    """One or more linear layers of one input, computed as one GEMM."""

    bias: Tensor | None = None

    def __init__(self, build: BuildContext, *parts: Part, bias: bool) -> None:
        """parts: the layers' weights, one after another."""
        super().__init__()
        self.comm = build.comm
        self.weight = build.linear(*parts)
        if bias:
            self.declare("bias", build.dtype, *map(bias_of, parts))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.linear(x, self.bias)

    def forward_normed(
        self,
        norm: RMSNormFused,
        x: Tensor,
        residual: Tensor | None,
        gate: Activation | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Apply norm, then the projection, then the gated activation. Returns (output,
        residual)."""
        return norm.linear(self.weight, x, residual, self.bias, gate)


class LinearColParallelMerged(Linear):
    """Several linear layers of one input as one GEMM: [T, D] -> their outputs side by side.

    columns: this rank's share of each layer's outputs.
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
        self.columns = build.columns(out_size, *names)
        shape = (out_size, in_size)
        super().__init__(build, *(_rows(name, shape, self.columns) for name in names), bias=bias)


class LinearQKVMerged(Linear):
    """Queries, keys and values as one GEMM: [T, D] -> [T, (N + 2K) * H] with local N and K.

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
        heads = split_heads(num_q_heads, num_kv_heads, build.comm.size)[build.comm.rank]
        self.num_q_heads, self.num_kv_heads = len(heads.q), len(heads.kv)
        self.q_columns = times(heads.q, head_dim)
        q_name, k_name, v_name = names
        kv_columns = times(heads.kv, head_dim)
        q_shape, kv_shape = (num_q_heads * head_dim, in_size), (num_kv_heads * head_dim, in_size)
        super().__init__(
            build,
            _rows(q_name, q_shape, self.q_columns),
            _rows(k_name, kv_shape, kv_columns),
            _rows(v_name, kv_shape, kv_columns),
            bias=bias,
        )


class LinearRowParallel(Linear):
    """[T, `share` of the inputs] -> this rank's partial sum [T, D].

    share: the inputs that this rank has, of `in_size`.
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
        weight = Part(name=f"{name}.weight", shape=(out_size, in_size), axis=1, share=share)
        super().__init__(build, weight, bias=bias)

    def forward(self, x: Tensor, gate: Activation | None = None) -> Tensor:
        # The all-reduce must add the bias once.
        bias = self.bias if self.comm.rank == 0 else None
        return self.weight.gated_linear(x, gate, bias) if gate else self.weight.linear(x, bias)


def _rows(name: str, shape: tuple[int, int], share: range) -> Part:
    """Return the rows `share` of the weight of linear layer `name`."""
    return Part(name=f"{name}.weight", shape=shape, axis=0, share=share)


def bias_of(part: Part) -> Part:
    """Return the bias of the rows of a weight."""
    rows = part.share if part.axis == 0 else range(part.shape[0])
    return Part(name=f"{part.module}.bias", shape=part.shape[:1], axis=0, share=rows)
