"""Attention of few decode rows with short contexts on Hopper: the host side of
`csrc/few_attention.cu`.

Such a step is a chain of short kernels, each of which waits for the one before. Triton's kernel
merges KV splits through memory; the blocks of this one send each other their sums.
"""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor

from minisgl.attention.base import QKVSteps
from minisgl.attention.paged import SHORT_CONTEXT
from minisgl_kernels.hopper import TYPES, Kernels, load_gemm

if TYPE_CHECKING:
    from minisgl.kvcache.pool import LayerPool

MOST_BLOCKS: Final = 8  # of a cluster
WARPS: Final = (8, 4)  # of a block
FEW_BLOCKS: Final = 64
"""Up to so many blocks in all they have 8 warps; above, 4, so that blocks of the next kernel fit
beside them."""
DIMS: Final = (64, 128)  # of a head
MOST_HEADS: Final = 16  # query heads of a key/value head; rows of the matrix instructions
KEYS: Final = 16  # of a warp, at a time
STAGES: Final = 2


class _Task(ctypes.Structure):
    """struct Task of `csrc/few_attention.cu`."""

    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in (
                *("qkv", "k", "v", "table", "rows", "slots", "cos_sin", "q_weight", "k_weight"),
                *("sinks", "out", "table_stride", "rows_stride"),
            )
        ),
        *((name, ctypes.c_int32) for name in ("heads", "group", "page_bits", "window")),
        *((name, ctypes.c_float) for name in ("eps", "scale")),
    )


class Kind(NamedTuple):
    """What a kernel is compiled for. is_wide: more than 8 query heads share a key/value head.
    is_normed: queries and keys are normed."""

    dtype: torch.dtype
    head_dim: int
    warps: int
    is_wide: bool
    is_normed: bool

    @property
    def shared_bytes(self) -> int:
        """What a block takes: tiles, queries, the new key and value, masses, and sums."""
        row = self.head_dim * 2
        masses = (self.warps + MOST_BLOCKS) * MOST_HEADS * 8
        tiles = self.warps * STAGES * 2 * KEYS * row
        return tiles + MOST_HEADS * row + 2 * row + masses + MOST_HEADS * self.head_dim * 4


def kernel_cubin(kind: Kind) -> bytes:
    """Return the compiled kernel. Raises JitUnavailable."""
    numbers = {
        "WARPS": kind.warps,
        "STAGES": STAGES,
        "DIM": kind.head_dim,
        "WIDE": kind.is_wide,
        "NORM": kind.is_normed,
        "SHARED_BYTES": kind.shared_bytes,
    }
    return load_gemm("few_attention", kind.dtype, (), numbers)


class FewAttention:
    """The kernels on the current device."""

    def __init__(self) -> None:
        """Raises JitUnavailable where nothing can be compiled, RuntimeError without a device."""
        otherwise = "Triton's kernel attends for few rows"
        self._kernels = Kernels("few_attention", kernel_cubin, otherwise)

    def takes(self, qkv: Tensor, steps: QKVSteps, pool: LayerPool, *, is_short: bool) -> bool:
        """Return whether the kernel computes `decode_qkv` of these rows, if all dims rotate.
        Compiles it at the first call. is_short: see `PagedMetadata`."""
        layer, page_size = steps.layer, pool.k.shape[1]
        if not is_short and (layer.window is None or layer.window > SHORT_CONTEXT):
            return False
        if layer.head_dim not in DIMS or qkv.dtype not in TYPES or pool.k.dtype != qkv.dtype:
            return False
        if layer.softcap or layer.latent or steps.norms_values or page_size & (page_size - 1):
            return False
        weights = (steps.q_norm_weight, steps.k_norm_weight)
        if any(weight is not None and weight.dtype != qkv.dtype for weight in weights):
            return False
        if layer.num_q_heads > MOST_HEADS * layer.num_kv_heads:
            return False
        if not self._blocks(len(qkv) * layer.num_kv_heads):
            return False
        kind = self._kind(qkv, steps)
        return self._kernels.get_all([kind._replace(warps=warps) for warps in WARPS])

    def _blocks(self, pairs: int) -> int:
        """Return the blocks of a cluster, so that all run at once; 0 if there are too many pairs of
        a row and a key/value head."""
        cores = self._kernels.num_cores
        return 8 if pairs * 8 <= cores else 4 if pairs * 4 <= 2 * cores else 0

    def _kind(self, qkv: Tensor, steps: QKVSteps) -> Kind:
        layer = steps.layer
        pairs = len(qkv) * layer.num_kv_heads
        return Kind(
            dtype=qkv.dtype,
            head_dim=layer.head_dim,
            warps=max(WARPS) if pairs * self._blocks(pairs) <= FEW_BLOCKS else min(WARPS),
            is_wide=layer.num_q_heads > 8 * layer.num_kv_heads,
            is_normed=steps.q_norm_weight is not None and steps.k_norm_weight is not None,
        )

    def decode(
        self,
        qkv: Tensor,
        steps: QKVSteps,
        pool: LayerPool,
        page_table: Tensor,
        rows: Tensor,
        slots: Tensor,
        out_BNH: Tensor,
    ) -> None:
        """Norm, rotate and store q, k and v of each row, attend, and write the result to out_BNH.

        qkv: [B, (N + 2K) * H], contiguous. rows, slots: see `PoolBatch`.
        """
        layer, kind = steps.layer, self._kind(qkv, steps)
        pairs = len(qkv) * layer.num_kv_heads
        size = self._blocks(pairs)
        weights = (steps.q_norm_weight, steps.k_norm_weight)
        task = _Task(
            *(x.data_ptr() for x in (qkv, pool.k, pool.v, page_table, rows, slots, steps.cos_sin)),
            *(0 if weight is None else weight.data_ptr() for weight in weights),
            layer.sinks.weight.data_ptr() if layer.sinks else 0,
            out_BNH.data_ptr(), page_table.stride(0), rows.stride(0), layer.num_kv_heads,
            layer.num_q_heads // layer.num_kv_heads, pool.k.shape[1].bit_length() - 1,
            layer.window or 0, steps.norm_eps, layer.scale * math.log2(math.e),
        )  # fmt: skip
        self._kernels.launch(
            self._kernels.get(kind), pairs * size, kind.warps * 32, kind.shared_bytes,
            ctypes.addressof(task), cluster=size,
        )  # fmt: skip
