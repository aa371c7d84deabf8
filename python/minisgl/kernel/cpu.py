"""The C++ twins of the ops, for the CPU: `Ops` with what `kernel/csrc/` does faster.

What is not here is inherited: torch does it as well, or, like `store_kv`, the C++ attention does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minisgl.core import BatchSamplingArgs
from minisgl.kernel.ops import Ops


class CpuOps(Ops):
    name = "cpu"

    def __init__(self, library: Any) -> None:
        """`library` is what `minisgl.kernel.jit.load_library` returned."""
        self._rms_norm = library.rms_norm
        self._add_rms_norm = library.add_rms_norm
        self._apply_rope = library.apply_rope
        self._silu_and_mul = library.silu_and_mul
        self._gelu_and_mul = library.gelu_and_mul
        self._experts = library.experts
        self._sample = library.sample

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty(x.shape, dtype=x.dtype)
        self._rms_norm(x, weight, out, eps, torch.get_num_threads())
        return out

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        out, total = torch.empty(x.shape, dtype=x.dtype), torch.empty(x.shape, dtype=x.dtype)
        self._add_rms_norm(x, residual, weight, out, total, eps, torch.get_num_threads())
        return out, total

    def apply_rope(
        self, q_TNH: Tensor, k_TKH: Tensor, cos_sin_PR: Tensor, positions_T: Tensor
    ) -> tuple[Tensor, Tensor]:
        q_out, k_out = _empty_like(q_TNH), _empty_like(k_TKH)
        self._apply_rope(
            q_TNH, k_TKH, cos_sin_PR, positions_T.int(), q_out, k_out, torch.get_num_threads()
        )
        return q_out, k_out

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        out = torch.empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2, dtype=gate_up.dtype)
        self._silu_and_mul(gate_up, out, torch.get_num_threads())
        return out

    def gelu_and_mul(self, gate_up: Tensor) -> Tensor:
        out = torch.empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2, dtype=gate_up.dtype)
        self._gelu_and_mul(gate_up, out, torch.get_num_threads())
        return out

    def experts(
        self,
        x_TD: Tensor,
        gate_up_LGD: Tensor,
        down_LDF: Tensor,
        weights_TK: Tensor,
        ids_TK: Tensor,
        first: int,
    ) -> Tensor:
        """The weighted sums of the experts from `first` on (`minisgl.moe.base`), [T, D]."""
        out_TD = torch.empty(x_TD.shape, dtype=x_TD.dtype)
        self._experts(
            x_TD, gate_up_LGD, down_LDF, weights_TK, ids_TK, out_TD, first, torch.get_num_threads()
        )
        return out_TD

    def logits(self, x_SV: Tensor) -> Tensor:
        return x_SV  # `sample` reads any dtype and computes in float32

    def sample(self, logits_SV: Tensor, args: BatchSamplingArgs) -> Tensor:
        ids_S = torch.empty(len(logits_SV), dtype=torch.int32)
        self._sample(
            logits_SV,
            None if args.all_greedy else args.temperatures,
            args.top_ks,
            args.top_ps,
            args.min_ps,
            args.seeds,
            args.output_idxs,
            ids_S,
            torch.get_num_threads(),
        )
        return ids_S


def _empty_like(x: Tensor) -> Tensor:
    """Contiguous, where `torch.empty_like` would copy the strides of a view."""
    return torch.empty(x.shape, dtype=x.dtype)
