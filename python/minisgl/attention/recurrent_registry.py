"""Creates the backend of recurrent layers, by the name of the model's attention backend."""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.attention.recurrent import RecurrentBackend, TorchRecurrentBackend
from minisgl.kernel.library import JitUnavailable, load_cpu_library


def create_recurrent_backend(
    name: str, device: torch.device, page_size: int, state_table: Tensor
) -> RecurrentBackend:
    """Return the backend. name: "torch" for the reference, any other for the fastest on
    `device`."""
    if name != "torch" and device.type == "cuda":
        from minisgl.attention.recurrent_triton import TritonRecurrentBackend
        from minisgl.kernel.delta_decode import DeltaDecode
        from minisgl.kernel.delta_hopper import DeltaPrompts
        from minisgl.kernel.hopper import on_hopper

        made = on_hopper(lambda: (DeltaDecode(), DeltaPrompts()), "Triton computes the delta rule")
        return TritonRecurrentBackend(page_size, state_table, made or (None, None))
    if name != "torch":
        try:
            library = load_cpu_library()
        except JitUnavailable:  # `create_attention_backend` has logged it
            return TorchRecurrentBackend(page_size, state_table)
        from minisgl.attention.recurrent_cpu import CpuRecurrentBackend

        return CpuRecurrentBackend(library, page_size, state_table)
    return TorchRecurrentBackend(page_size, state_table)
