"""Creates the backend of recurrent layers, by the name of the model's attention backend."""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.kernel.library import JitUnavailable, load_cpu_library
from minisgl_zoo.recurrent.backend import RecurrentBackend, TorchRecurrentBackend


def create_recurrent_backend(
    name: str, device: torch.device, page_size: int, state_table: Tensor
) -> RecurrentBackend:
    """Return the backend. name: "torch" for the reference, any other for the fastest on
    `device`."""
    if name != "torch" and device.type == "cuda":
        from minisgl_kernels.delta_decode import DeltaDecode
        from minisgl_kernels.delta_hopper import DeltaPrompts
        from minisgl_kernels.hopper import on_hopper
        from minisgl_zoo.recurrent.backend_triton import TritonRecurrentBackend

        made = on_hopper(lambda: (DeltaDecode(), DeltaPrompts()), "Triton computes the delta rule")
        return TritonRecurrentBackend(page_size, state_table, made or (None, None))
    if name != "torch":
        try:
            library = load_cpu_library()
        except JitUnavailable:  # `create_attention_backend` has logged it
            return TorchRecurrentBackend(page_size, state_table)
        from minisgl_zoo.recurrent.backend_cpu import CpuRecurrentBackend

        return CpuRecurrentBackend(library, page_size, state_table)
    return TorchRecurrentBackend(page_size, state_table)
