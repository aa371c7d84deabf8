"""The activation of a mixture's experts, for GEMMs that leave gate and up apart.

The GEMMs by packed weights (`packed_gemm`) add no biases. This kernel adds those of gate and up
before the activation; `minisgl.kernel.triton.moe.experts` adds those of down to the sum over
experts.

Axes: T tokens, K experts of a token, L experts of this rank, F intermediate size, G = 2F.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.triton.launch import Launcher, begin
from minisgl.kernel.triton.moe import Gate, gated

BLOCK = 1024


def activate_pairs(
    both: Tensor, ids_TK: Tensor, held: range, out: Tensor, *, gate: Gate, bias_LG: Tensor | None
) -> None:
    """Write out [T * K, F]: `gate` of `both` [T * K, 2F] (gate, then up) plus the bias of each
    pair's expert.

    held: this rank's experts. Pairs of other experts are not written.
    """
    num_pairs, inner = out.shape
    _launch_activate(
        (num_pairs, -(-inner // BLOCK), 1),
        (both, ids_TK, both if bias_LG is None else bias_LG, out),
        (len(held), held.start, inner, bias_LG is not None, *gate.constants, BLOCK),
        dtype=out.dtype, num_warps=4,
    )  # fmt: skip


@triton.jit
def _activate(
    both_ptr, ids_ptr, bias_ptr, out_ptr,
    L: tl.constexpr, FIRST: tl.constexpr, F: tl.constexpr, BIAS: tl.constexpr, GELU: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = f < F
    begin(PDL)
    expert = tl.load(ids_ptr + pair) - FIRST
    if (expert < 0) | (expert >= L):
        return
    at = both_ptr + pair * 2 * F + f
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + F, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        bias = bias_ptr + expert.to(tl.int64) * 2 * F + f
        gate += tl.load(bias, mask=inside, other=0.0).to(tl.float32)
        up += tl.load(bias + F, mask=inside, other=0.0).to(tl.float32)
    act = gated(gate, up, out_ptr.dtype.element_ty, GELU, ALPHA, LIMIT)
    tl.store(out_ptr + pair * F + f, act, mask=inside)


_launch_activate = Launcher(_activate)
