"""The C++ twins of the ops, for the CPU: `Ops` with the ops that `kernel/csrc/` computes faster.

Other ops are inherited: torch computes them just as fast, or the C++ attention includes them
(`store_kv`).
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.core import BatchSamplingArgs
from minisgl.kernel.ops import Activation, Ops
from minisgl.utils.arch import cpu_flags

GATES: dict[Activation | None, int] = {None: 0, "silu": 1, "gelu_tanh": 2}
"""The values of `Gate` in csrc/product.h."""
PANEL = 16  # csrc/panels.h packs so many outputs together
FEW_ROWS = 64
"""On a processor with AMX tiles, torch computes GEMMs of more rows than this. Not those of logits:
it has none with bfloat16 inputs and float32 outputs. The rows are padded to a multiple of this."""
HUGE_BYTES = 2 << 20
"""x86_64 and aarch64 have huge pages of this size, at multiples of it (with pages of 4 KiB)."""
ADVICE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux only


class CpuOps(Ops):
    name = "cpu"

    def __init__(self, compiled: Any) -> None:
        """`compiled` is what `minisgl.kernel.jit.load_library` returned, or calls its functions.
        `calls` is for packages that use more of them."""
        self.calls = library = compiled
        self._copy_finite = library.copy_finite
        self._rms_norm = library.rms_norm
        self._add_rms_norm = library.add_rms_norm
        self._apply_rope = library.apply_rope
        self._gated: dict[Activation, Any] = {
            "silu": library.silu_and_mul,
            "gelu_tanh": library.gelu_and_mul,
        }
        self._experts = library.experts
        self._sample, self._take_ids = library.sample, library.take_ids
        self._pack, self._unpack = library.pack, library.unpack
        self._packed_rows, self._packed_linear = library.packed_rows, library.packed_linear
        self._plain_rows, self._plain_linear = library.plain_rows, library.plain_linear
        # torch computes GEMMs of float32 weights with more rows than this as fast.
        self.most_plain_rows = 32 if "avx2" in cpu_flags() else 8
        self.most_packed_rows = FEW_ROWS if torch.cpu._is_amx_tile_supported() else 1 << 30

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        return huge_empty(shape, dtype)

    def copy_finite(self, source: Tensor, target: Tensor) -> bool:
        if source.dtype == target.dtype and source.is_contiguous():
            return self._finite(source, target)
        target.copy_(source)
        is_wider = target.itemsize > source.itemsize and source.is_contiguous()
        return self._finite(source if is_wider else target, None)  # the fewer bytes

    def all_finite(self, x: Tensor) -> bool:
        return self._finite(x, None)

    def _finite(self, source: Tensor, target: Tensor | None) -> bool:
        is_finite: bool = self._copy_finite(source, target, torch.get_num_threads())
        return is_finite

    # --- plain float32 weights, see csrc/plain.cpp ------------------------------------------------

    def embed(self, ids_T: Tensor, weight_VD: Tensor) -> Tensor:
        if weight_VD.dtype != torch.float32 or ids_T.dim() != 1:
            return super().embed(ids_T, weight_VD)
        out_TD = torch.empty(ids_T.shape[0], weight_VD.shape[1], dtype=torch.float32)
        self._plain_rows(ids_T, weight_VD, out_TD)
        return out_TD

    def linear(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        gate: Activation | None = None,
    ) -> Tensor:
        outputs, inputs = weight.shape
        num_rows = x.numel() // max(inputs, 1)
        is_ours = weight.dtype == x.dtype == torch.float32 and weight.is_contiguous()
        if not is_ours or num_rows > self.most_plain_rows:
            return super().linear(x, weight, bias, gate)
        out = torch.empty(*x.shape[:-1], outputs, dtype=torch.float32)
        rows, num_threads = x.reshape(num_rows, inputs).contiguous(), torch.get_num_threads()
        self._plain_linear(rows, weight, bias, out.view(num_rows, outputs), num_threads)
        return self.gated(out, gate) if gate else out

    def logits(self, x_SD: Tensor, weight_LD: Tensor) -> Tensor:
        if weight_LD.dtype == torch.float32:
            return self.linear(x_SD.float(), weight_LD)
        return super().logits(x_SD, weight_LD)

    # --- packed weights, see csrc/panels.h --------------------------------------------------------

    def packs(self, dtype: torch.dtype) -> bool:
        return dtype == torch.bfloat16

    def pack(self, weight: Tensor) -> None:
        """Pack a bfloat16 matrix [O, I] in place."""
        self._pack(weight, torch.get_num_threads())

    def unpack(self, weight: Tensor) -> Tensor:
        """Return a packed matrix as a plain one, in new memory."""
        plain = weight.clone()
        self._unpack(plain, torch.get_num_threads())
        return plain

    def packed_rows(self, ids_T: Tensor, weight: Tensor) -> Tensor:
        """See `Ops.embed`."""
        out_TD = torch.empty(len(ids_T), weight.shape[1], dtype=weight.dtype)
        self._packed_rows(ids_T, weight, out_TD, torch.get_num_threads())
        return out_TD

    def packed_logits(self, x_SD: Tensor, weight: Tensor) -> Tensor:
        """See `Ops.logits`."""
        out_SV = torch.empty(x_SD.shape[0], weight.shape[0], dtype=torch.float32)
        num_threads = torch.get_num_threads()
        self._packed_linear(x_SD.contiguous(), weight, None, GATES[None], out_SV, num_threads)
        return out_SV

    def packed_linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, gate: Activation | None
    ) -> Tensor:
        """See `Ops.linear`."""
        outputs, inputs = weight.shape
        rows = x if x.dim() == 2 else x.reshape(-1, inputs)
        num_rows = rows.shape[0]  # `len` of a tensor takes ten times as long
        if num_rows > self.most_packed_rows:
            # torch compiles a GEMM for each number of rows, and keeps it.
            padded = F.pad(rows, (0, 0, 0, -num_rows % FEW_ROWS))
            y = F.linear(padded, self.unpack(weight), bias)[:num_rows].view(*x.shape[:-1], outputs)
            return self.gated(y, gate) if gate else y
        fused = gate if outputs % (2 * PANEL) == 0 else None
        width = outputs // 2 if fused else outputs
        out = torch.empty(num_rows, width, dtype=x.dtype)
        num_threads = torch.get_num_threads()
        self._packed_linear(rows.contiguous(), weight, bias, GATES[fused], out, num_threads)
        y = out if rows is x else out.view(*x.shape[:-1], width)
        return self.gated(y, gate) if gate and not fused else y

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
        # Contiguous: `torch.empty_like` would have the strides of views.
        q_out, k_out = (torch.empty(x.shape, dtype=x.dtype) for x in (q_TNH, k_TKH))
        self._apply_rope(
            q_TNH, k_TKH, cos_sin_PR, positions_T.int(), q_out, k_out, torch.get_num_threads()
        )
        return q_out, k_out

    def gated(self, gate_up: Tensor, gate: Activation) -> Tensor:
        out = torch.empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2, dtype=gate_up.dtype)
        self._gated[gate](gate_up, out, torch.get_num_threads())
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
        """Return the weighted sums of the experts from `first` on (`minisgl.moe.base`), [T, D]."""
        out_TD = torch.empty(x_TD.shape, dtype=x_TD.dtype)
        self._experts(
            x_TD, gate_up_LGD, down_LDF, weights_TK, ids_TK, out_TD, first, torch.get_num_threads()
        )
        return out_TD

    def take_ids(self, token_ids_T: Tensor, table_idxs_D: Tensor, last_token_R: Tensor) -> Tensor:
        ids_T = torch.empty(len(token_ids_T), dtype=torch.int32)
        self._take_ids(token_ids_T, table_idxs_D, last_token_R, ids_T)
        return ids_T

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


def huge_empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a new tensor in huge pages, if Linux has them for programs that ask.

    A step reads all weights once, and with pages of 4 KB it translates an address every 4 KB.
    The part after the last whole huge page has small pages, so no memory is wasted. If Linux has no
    huge pages, all pages are small.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    huge_bytes = num_bytes // HUGE_BYTES * HUGE_BYTES
    if ADVICE is None or not huge_bytes:
        return torch.empty(shape, dtype=dtype)
    # Linux aligns a mapping of whole huge pages.
    memory = mmap.mmap(-1, huge_bytes + HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(ADVICE, 0, huge_bytes)
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape)).view(*shape)
