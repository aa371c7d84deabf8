"""The rows of this package (`minisgl.plugins`)."""

from __future__ import annotations

from typing import Final

from minisgl.plugins import Row

_TRITON: Final = {"ops": "triton"}
"""For the name of the device's `Ops`."""

ROWS: Final = [
    Row("ops", "add_gated", "minisgl_kernels.triton.gates:add_gated", when=_TRITON),
    Row("ops", "gates", "minisgl_kernels.triton.gates:TritonGates", when=_TRITON),
    Row("ops", "sandwich", "minisgl_kernels.triton.sandwich:TritonSandwich", when=_TRITON),
    Row("ops", "packed", "minisgl_kernels.packed:PackedGemms", when=_TRITON),
    Row("ops", "recurrent", "minisgl_kernels.recurrent:create", when={"device": "cuda"}),
]
