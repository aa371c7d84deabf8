"""Attention whose output is multiplied by the sigmoid of a gate that its projection computes.

Axes: T tokens of this step, S rows that sample, D hidden size, N query heads, K key/value heads
(both of this rank), H head dim, G gates of a head.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from minisgl.core import Batch
from minisgl.layers import RMSNormFused
from minisgl.layers.linear import Linear
from minisgl.layers.shard import split_heads, times
from minisgl.models.blocks.decoder import Attention, LayerBuild
from minisgl.quantization import Part
from minisgl_zoo.recurrent.gates import create_gates


class GatedAttention(Attention):
    """One GEMM computes queries, keys, values and gates. gate_name, gate_size: `gate` and its size
    in `LinearGatedQKV`; 0 is the head dim."""

    gate_name: ClassVar[str | None] = None
    gate_size: ClassVar[int] = 0

    def __init__(self, at: LayerBuild) -> None:
        super().__init__(at)
        size = self.gate_size or at.layer.head_dim
        self.gated_qkv = LinearGatedQKV(at, gate=self.gate_name, gate_size=size)
        del self.qkv
        self.gates = create_gates(at.build.ops)

    def forward(
        self,
        norm: RMSNormFused,
        x_TD: Tensor,
        residual_TD: Tensor | None,
        batch: Batch,
        rows_S: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        projected, residual_TD = self.gated_qkv.forward_normed(norm, x_TD, residual_TD)
        qkv, gate_TNG = self.gated_qkv.split_gate(projected)
        attended = self.attend.forward(qkv, batch)
        residual_TD, attended, gate_TNG = norm.select(rows_S, residual_TD, attended, gate_TNG)
        return self.out.forward(self.gates.output(attended, gate_TNG)), residual_TD


class LinearGatedQKV(Linear):
    """`LinearQKVMerged` with gates for each query head.

    gate: the name of the gates' tensor; None if the query tensor has a query and a gate for each
    head. gate_size: the gates of a head, G: the head dim, or 1.
    """

    def __init__(self, at: LayerBuild, *, gate: str | None, gate_size: int) -> None:
        build, layer, head_dim = at.build, at.layer, at.layer.head_dim
        num_q_heads, num_kv_heads = layer.num_heads, layer.num_kv_heads
        heads = split_heads(num_q_heads, num_kv_heads, build.comm.size)[build.comm.rank]
        self.num_q_heads, self.num_kv_heads = len(heads.q), len(heads.kv)
        self.head_dim, self.gate_size, self._is_gate_apart = head_dim, gate_size, gate is not None

        def rows(name: str, num_heads: int, share: range, size: int = head_dim) -> Part:
            shape = (num_heads * size, at.spec.config.hidden_size)
            name = f"{layer.prefix}.self_attn.{name}.weight"
            return Part(name=name, shape=shape, axis=0, share=times(share, size))

        q_size = head_dim if gate else head_dim + gate_size
        super().__init__(
            build,
            rows("q_proj", num_q_heads, heads.q, q_size),
            rows("k_proj", num_kv_heads, heads.kv),
            rows("v_proj", num_kv_heads, heads.kv),
            *([rows(gate, num_q_heads, heads.q, gate_size)] if gate else []),
            bias=at.spec.qkv_bias,
        )

    def split_gate(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        """Return q, k and v side by side, [T, (N + 2K) * H], and the gates, [T, N, G], as a view.
        projected: the output, [T, (N + 2K) * H + N * G]."""
        if self._is_gate_apart:
            width = (self.num_q_heads + 2 * self.num_kv_heads) * self.head_dim
            qkv, gate = projected.tensor_split([width], dim=-1)
            return qkv.contiguous(), gate.view(len(gate), self.num_q_heads, self.gate_size)
        gated_q, kv = projected.tensor_split([2 * self.num_q_heads * self.head_dim], dim=-1)
        shape = (len(projected), self.num_q_heads, 2, self.head_dim)
        q_TNH, gate_TNH = gated_q.reshape(shape).unbind(2)
        return torch.cat((q_TNH.flatten(1), kv), dim=1), gate_TNH
