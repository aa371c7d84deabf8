"""The formats that `csrc/decode.cuh` decodes, for both kernels that include it."""

from __future__ import annotations

import torch

from minisgl.kernel.triton.moe import Gate
from minisgl_zoo.weights.quantised import Packed

KINDS = {"int4": 0, "fp4": 1, "fp8": 2, "int8": 3}
SCALES = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float8_e4m3fn: 3,
    torch.uint8: 4,
}
CHUNK_BYTES = 64  # of a row of weights: 16 bytes of each of four threads


def decodes(weight: Packed) -> bool:
    """Return whether decode.cuh has this format. Each kernel has further limits."""
    if weight.kind not in KINDS:
        return False
    if not weight.is_4_bit and (weight.zero is not None or weight.middle):
        return False
    if weight.scale is None:
        return weight.kind != "fp4"
    return weight.scale.dtype in SCALES and (weight.kind != "fp4" or weight.group in (16, 32))


def format_macros(weight: Packed, gate: Gate | None) -> dict[str, int]:
    """Return the macros of decode.cuh and gate.cuh, and the others that describe the format."""
    return {
        "BFLOAT16": 1,  # of x
        "KIND": KINDS[weight.kind],
        "GROUP": weight.group,
        "SCALE": SCALES[weight.scale.dtype] if weight.scale is not None else 0,
        "ROWS": weight.rows,
        "ZEROS": int(weight.zero is not None),
        "MIDDLE": weight.middle if weight.zero is None else 0,
        "OUTER": int(weight.outer is not None),
        "GATE": 0 if gate is None else gate_number(gate),
    }


def gate_number(gate: Gate) -> int:
    """Return GATE of gate.cuh."""
    return 3 if gate.limit else 2 if gate.is_gelu else 1
