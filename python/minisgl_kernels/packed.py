"""Chooses the GPU kernel of a GEMM by a packed weight, by the number of rows.

Up to 8 rows (4 of fp8): on Hopper our skinny GEMM (`packed_skinny`). Otherwise, one row: a GEMV
that holds the weights in registers. Up to `MAX_STREAM` rows, not of fp8: on Hopper a GEMM that
decodes beside the matrix instructions (`packed_grouped`). Some rows (`MAX_FP8`, `MAX_DECODED`): a
GEMM that decodes tiles of the weights. More: fp8 weights that cuBLAS takes are multiplied on fp8
tensor cores, by it or, in few rows, by `fp8_gemm`, with activations rounded to fp8; other weights
are dequantised for this GEMM.

Axes: M rows, D inputs, F outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.kernel.ops import Activation, Ops
from minisgl_kernels.packed_grouped import PackedGrouped, Streamed
from minisgl_kernels.packed_skinny import PackedSkinny
from minisgl_kernels.triton import fp8, packed_gemv
from minisgl_kernels.triton.fp8_gemm import choose_stream, stream_gemm
from minisgl_kernels.triton.packed import dense
from minisgl_kernels.triton.packed_gemm import TileConfig, packed_gemm
from minisgl_zoo.weights.quantised import Packed

TYPES = (torch.bfloat16, torch.float16)
MAX_FP8, MAX_DECODED = 16, 128
"""Rows up to which tiles are decoded: of weights that fp8 tensor cores multiply, and of others. On
an H200 the four GEMMs of a layer of 14B take 146 us with 16 rows in either format, and 228 (fp8)
and 217 (int4) with 64; on fp8 tensor cores 162 with 128. With 256 rows decoding int4 takes 327 us
for gate and up alone, dequantising and cuBLAS 279 (README.md)."""
MAX_STREAM = 768
"""Rows up to which our GEMM for Hopper decodes. The four GEMMs of a layer of 14B in int4 take it
921 us with 768 rows and 1,227 with 1,024, in its first version; dequantising and cuBLAS 945 and
1,204 (README.md)."""
TILE_N, MAX_M, MAX_SPLIT = 64, 64, 16
MIN_STEPS = 8
"""The fewest steps of a program, if several share the inputs."""
PROGRAMS = 4
"""Programs of a multiprocessor at once."""


def choose_tile(rows: int, outputs: int, inputs: int, group: int, num_cores: int) -> TileConfig:
    """Return the tiles of a GEMM. The split of the inputs does not depend on the number of rows, so
    a row has the same result in every batch."""
    k = group if 32 <= group <= 128 else 128
    steps = -(-inputs // k)
    blocks = -(-outputs // TILE_N)
    split = max(min(PROGRAMS * num_cores // blocks, steps // MIN_STEPS, MAX_SPLIT), 1)
    m = 16 if rows <= 16 else 32 if rows <= 32 else MAX_M
    return TileConfig(m=m, n=TILE_N, k=k, split=split)


class PackedGemms:
    """As `minisgl_zoo.weights.quantised.Gemms` says. Mutable: `_done` counts the programs that have
    ended a tile."""

    def __init__(self, ops: Ops, weight: Packed, dtype: torch.dtype) -> None:
        self._ops, self._weight, self._dtype = ops, weight, dtype
        self._skinny: PackedSkinny | None = getattr(ops, "packed_skinny", None)
        self._grouped: PackedGrouped | None = getattr(ops, "packed_grouped", None)
        device = weight.numbers.device
        self._num_cores = 132
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            self._num_cores = int(properties.multi_processor_count)
        self._is_fp8 = device.type == "cuda" and fp8.takes(weight, dtype)
        tiles = -(-weight.shape[-2] // TILE_N) * -(-MAX_DECODED // MAX_M)
        self._done = torch.zeros(tiles, dtype=torch.int32, device=device)
        self._streamed: Streamed | None = None
        if self._grouped and not self._is_fp8 and dtype == torch.bfloat16:
            self._streamed = self._grouped.prepare(weight)

    @staticmethod
    def reads(weight: Packed) -> bool:
        """Return whether Triton's kernels read this form: fp8 since compute capability 8.9."""
        device = weight.numbers.device
        if torch.float8_e4m3fn not in weight.key or device.type != "cuda":
            return True
        return torch.cuda.get_device_capability(device) >= (8, 9)

    def dense(self) -> Tensor:
        return dense(self._weight, self._dtype)

    def linear(self, x: Tensor, bias: Tensor | None, gate: Activation | None) -> Tensor:
        """See `Ops.linear`."""
        x_MD = x.reshape(-1, x.shape[-1]).contiguous()
        rows = len(x_MD)
        if done := self._few(x_MD, None, None, 0.0, bias, gate):
            return done[0].view(*x.shape[:-1], -1)
        if self._grouped and self._streamed and 0 < rows <= MAX_STREAM:
            y = self._grouped.linear(x_MD, self._streamed, bias, gate)
            if y is not None:
                return y.view(*x.shape[:-1], -1)
        if 0 < rows <= (MAX_FP8 if self._is_fp8 else MAX_DECODED):
            outputs, inputs = self._weight.shape
            tile = choose_tile(rows, outputs, inputs, self._weight.group, self._num_cores)
            y = packed_gemm(x_MD, self._weight, bias, tile, self._done)
        elif self._is_for_fp8(rows):
            y = self._fp8(*self._quantise(x_MD), rows, bias)
        else:
            return self._ops.linear(x, self.dense(), bias, gate)
        y = y.view(*x.shape[:-1], -1)
        return self._ops.gated(y, gate) if gate else y

    def logits(self, x_SD: Tensor) -> Tensor:
        """See `Ops.logits`."""
        if not 0 < len(x_SD) <= MAX_DECODED:
            return self._ops.logits(x_SD, self.dense())
        outputs, inputs = self._weight.shape
        tile = choose_tile(len(x_SD), outputs, inputs, self._weight.group, self._num_cores)
        return packed_gemm(x_SD.contiguous(), self._weight, None, tile, self._done, torch.float32)

    def quantises(self, rows: int) -> bool:
        """Return whether activations are rounded to fp8 with a scale for each 128."""
        return self._weight.group > 0 and self._is_for_fp8(rows)

    def _is_for_fp8(self, rows: int) -> bool:
        """Return whether fp8 tensor cores multiply so many rows. cuBLAS reads the scales of blocks
        in groups of four: with another number of them its products are wrong."""
        outputs, inputs = self._weight.shape[-2:]
        fits = self._weight.group == 0 or inputs % (4 * fp8.BLOCK) == 0
        has_kernel = fits or choose_stream(rows, outputs, inputs) is not None
        return self._is_fp8 and rows > MAX_FP8 and has_kernel

    def gated_linear(self, x_MG: Tensor, gate: Activation, bias: Tensor | None) -> Tensor:
        """Return `linear` of `Ops.gated(x_MG, gate)`. Requires that `quantises`."""
        return self._fp8(*fp8.gate_and_quantise(x_MG, silu=gate == "silu"), len(x_MG), bias)

    def _quantise(self, x_MD: Tensor) -> tuple[Tensor, Tensor]:
        return fp8.quantise(x_MD, fp8.BLOCK if self._weight.group else x_MD.shape[1])

    def _fp8(self, numbers: Tensor, scale_gM: Tensor, rows: int, bias: Tensor | None) -> Tensor:
        """Return x @ weight.T + bias of `rows` rows of quantised activations."""
        weight = self._weight
        config = choose_stream(rows, *weight.shape) if weight.group else None
        if config:
            assert weight.scale is not None
            y = stream_gemm(
                numbers, scale_gM, weight.numbers, weight.scale, rows, self._dtype, config,
                self._num_cores, self._done,
            )  # fmt: skip
        else:
            y = fp8.multiply(numbers, scale_gM, weight, self._dtype)[:rows]
        return y if bias is None else y + bias

    def norm_linear(
        self,
        x: Tensor,
        residual: Tensor | None,
        norm_weight: Tensor | None,
        eps: float,
        bias: Tensor | None,
        gate: Activation | None,
    ) -> tuple[Tensor, Tensor]:
        """See `Ops.norm_linear`."""
        if done := self._few(x, residual, norm_weight, eps, bias, gate):
            return done
        if norm_weight is not None and self.quantises(len(x)) and x.is_contiguous():
            numbers, scale, residual = fp8.norm_and_quantise(x, residual, norm_weight, eps)
            y = self._fp8(numbers, scale, len(x), bias)
            return self._ops.gated(y, gate) if gate else y, residual
        x, residual = self._ops.normed(x, residual, norm_weight, eps)
        return self.linear(x, bias, gate), residual

    def _few(
        self,
        x_MD: Tensor,
        residual: Tensor | None,
        norm_weight: Tensor | None,
        eps: float,
        bias: Tensor | None,
        gate: Activation | None,
    ) -> tuple[Tensor, Tensor] | None:
        """Return `norm_linear` by the kernels that compute the norm themselves; None for other
        numbers of rows."""
        arguments = (x_MD, residual, norm_weight, eps, self._weight, bias, gate)
        if self._skinny and (done := self._skinny.norm_linear(*arguments)):
            return done
        if len(x_MD) == 1 and x_MD.shape[1] <= packed_gemv.MAX_INPUTS:
            return packed_gemv.norm_linear(*arguments)
        return None
