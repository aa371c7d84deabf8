"""The rows of this package (`minisgl.plugins`)."""

from __future__ import annotations

from typing import Final

from minisgl.plugins import Row

_TRITON: Final = {"ops": "triton"}
"""For the name of the device's `Ops`."""

ROWS: Final = [
    Row("ops", "cpu", "minisgl_kernels.recording:create_ops"),
    Row("ops", "cuda", "minisgl_kernels.ops:create_ops"),
    Row("ops", "adapters", "minisgl_kernels.triton.adapters:AdapterProducts", when=_TRITON),
    Row("ops", "add_gated", "minisgl_kernels.triton.gates:add_gated", when=_TRITON),
    Row("ops", "gates", "minisgl_kernels.triton.gates:TritonGates", when=_TRITON),
    Row("ops", "sandwich", "minisgl_kernels.triton.sandwich:TritonSandwich", when=_TRITON),
    Row("ops", "norm_rope_store", "minisgl_kernels.triton.rotary:norm_rope_store"),
    Row("ops", "packed", "minisgl_kernels.packed:PackedGemms", when=_TRITON),
    Row("ops", "tiles", "minisgl_kernels.tiles:TileGemms", when=_TRITON),
    Row("ops", "recurrent", "minisgl_kernels.recurrent:create", when={"device": "cuda"}),
    Row("attention", "triton", "minisgl_kernels.hopper_backend:create_backend"),
    Row("attention", "fa2", "minisgl_kernels.flash_attn2:FlashAttention2Backend"),
    Row("moe", "plain", "minisgl_kernels.moe:create_backend", when=_TRITON),
    Row("moe", "packed", "minisgl_kernels.packed_moe:create_backend", when=_TRITON),
    Row("moe", "tiles", "minisgl_kernels.tile_moe:create_backend", when=_TRITON),
    Row("runners", "recorded", "minisgl_kernels.recorded_steps:create_runner", when={"ops": "cpu"}),
    Row("all_reduce", "compile", "minisgl_kernels.all_reduce:all_reduce_cubin"),
    Row("all_reduce", "connect", "minisgl_kernels.peer:connect_peers"),
    Row("memory", "interleave", "minisgl_kernels.numa:interleave"),
]
