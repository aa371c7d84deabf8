"""Attention whose output is multiplied by the sigmoid of a gate.

Axes: T tokens of this step, S rows that sample, D hidden size, N query heads, G gates of a head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from minisgl.models.decoder import Attention
from minisgl_zoo.layers.gated_attention import LinearGatedQKV
from minisgl_zoo.recurrent.gates import create_gates

if TYPE_CHECKING:
    from minisgl.core import Batch
    from minisgl.layers import RMSNormFused
    from minisgl.models.decoder import LayerBuild


class GatedAttention(Attention):
    """One GEMM computes queries, keys, values and gates. gate_name, gate_size: `gate` and its size
    in `LinearGatedQKV`; 0 is the head dim."""

    gate_name: ClassVar[str | None] = None
    gate_size: ClassVar[int] = 0

    def __init__(self, at: LayerBuild) -> None:
        super().__init__(at)
        spec, layer = at.spec, at.layer
        self.gated_qkv = LinearGatedQKV(
            at.build,
            in_size=spec.config.hidden_size,
            num_q_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            bias=spec.qkv_bias,
            prefix=f"{layer.prefix}.self_attn",
            gate=self.gate_name,
            gate_size=self.gate_size or layer.head_dim,
        )
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
