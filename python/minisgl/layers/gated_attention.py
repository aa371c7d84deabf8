"""The projection of attention whose output is multiplied by a gate: it also computes the gate.

Axes: T tokens, N query heads, K key/value heads, H head dim (all local to the rank).
"""

from __future__ import annotations

from torch import Tensor

from minisgl.layers.base import BuildContext
from minisgl.layers.linear import Linear
from minisgl.layers.shard import split_heads, times
from minisgl.quantization import Part


class LinearGatedQKV(Linear):
    """`LinearQKVMerged` for a query tensor that has a query and a gate for each head."""

    def __init__(
        self,
        build: BuildContext,
        *,
        in_size: int,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool,
        prefix: str,
    ) -> None:
        heads = split_heads(num_q_heads, num_kv_heads, build.comm.size)[build.comm.rank]
        self.num_q_heads, self.num_kv_heads = len(heads.q), len(heads.kv)
        self.q_columns, self.head_dim = times(heads.q, head_dim), head_dim

        def rows(name: str, num_heads: int, share: range, size: int) -> Part:
            shape = (num_heads * size, in_size)
            name = f"{prefix}.{name}.weight"
            return Part(name=name, shape=shape, axis=0, share=times(share, size))

        super().__init__(
            build,
            rows("q_proj", num_q_heads, heads.q, 2 * head_dim),
            rows("k_proj", num_kv_heads, heads.kv, head_dim),
            rows("v_proj", num_kv_heads, heads.kv, head_dim),
            bias=bias,
        )

    def split_gate(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        """[T, (2N + 2K) * H] -> q, k and v side by side, [T, (N + 2K) * H], and the gates,
        [T, N, H], as a view."""
        q_size = self.num_q_heads * self.head_dim
        gated_q, kv = projected.tensor_split([2 * q_size], dim=-1)
        shape = (len(projected), self.num_q_heads, 2, self.head_dim)
        q_TNH, gate_TNH = gated_q.view(shape).unbind(2)
        qkv = projected.new_empty((len(projected), q_size + kv.shape[1]))
        qkv[:, :q_size].view(q_TNH.shape).copy_(q_TNH)
        qkv[:, q_size:] = kv
        return qkv, gate_TNH
