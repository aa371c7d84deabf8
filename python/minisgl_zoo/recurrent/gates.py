"""The gates of hybrids' layers, in plain torch; only these layers import them.

`Gates` is to `minisgl_kernels.triton.gates` as `Ops` is to its twins: the specification, the
fallback and the oracle. Rounding follows Hugging Face transformers step by step.

Axes: T tokens, N heads, H head dim, G gates of a head, V value dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl import plugins
from minisgl.kernel.ops import Ops


class Gates:
    """Stateless. The ops return new tensors. The last axis of each argument is contiguous; rows may
    be parts of wider rows."""

    def __init__(self, ops: Ops) -> None:
        self.ops = ops

    def delta(self, ba: Tensor, a_log_N: Tensor, dt_bias_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log decay and the update rate of a gated delta net, both float32 [T, N].

        They are -exp(a_log) * softplus(a + dt_bias), and sigmoid(b) rounded to b's dtype. ba:
        [T, 2N], b then a. a_log_N, dt_bias_N: float32.
        """
        b_TN, a_TN = ba.chunk(2, dim=-1)
        g_TN = -a_log_N.exp() * F.softplus(a_TN.float() + dt_bias_N)
        return g_TN, b_TN.sigmoid().float()

    def norm(self, x_TNV: Tensor, weight_V: Tensor, eps: float, z: Tensor) -> Tensor:
        """Return rms_norm(x) * silu(z), [T, N * V]. z: [T, N * V], of x's dtype.

        The norm is rounded as in `Ops.rms_norm`; silu and the product are float32.
        """
        normed = self.ops.rms_norm(x_TNV, weight_V, eps).flatten(1)
        return (normed * F.silu(z.float())).to(x_TNV.dtype)

    def output(self, x: Tensor, gate_TNG: Tensor) -> Tensor:
        """Return x * sigmoid(gate), [T, N * H]; the sigmoid is rounded to the tensors' dtype.

        gate: one for each element of x (G = H), or one for each head (G = 1).
        """
        num_heads = gate_TNG.shape[1]
        x_TNH = x.reshape(len(x), num_heads, x.shape[1] // num_heads)
        return (x_TNH * torch.sigmoid(gate_TNG)).flatten(1)


def create_gates(ops: Ops) -> Gates:
    """Return the gates of the device that `ops` are for."""
    gates: type[Gates] = plugins.find("ops", "gates", ops=ops.name) or Gates
    return gates(ops)
