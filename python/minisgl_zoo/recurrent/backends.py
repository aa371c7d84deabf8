"""Creates the backend of recurrent layers, by the name of the model's attention backend."""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl import plugins
from minisgl.kernel.jit import load_library
from minisgl.kernel.once import JitUnavailable
from minisgl.utils.logger import get_logger
from minisgl_zoo.recurrent.backend import RecurrentBackend, TorchRecurrentBackend
from minisgl_zoo.recurrent.backend_cpu import CpuRecurrentBackend

logger = get_logger(__name__)


def create_recurrent_backend(
    name: str, device: torch.device, page_size: int, state_table: Tensor
) -> RecurrentBackend:
    """Return the backend. name: "torch" for the reference, any other for the fastest on
    `device`."""
    reference = TorchRecurrentBackend(page_size, state_table)
    if name == "torch":
        return reference
    if device.type == "cpu":
        try:
            return CpuRecurrentBackend(load_library(), page_size, state_table)
        except JitUnavailable:  # `create_attention_backend` has logged it
            return reference
    create = plugins.find("ops", "recurrent", device=device.type)
    if create is None:
        logger.warning("recurrent layers: plain torch, slower (minisgl_kernels is not installed)")
        return reference
    backend: RecurrentBackend = create(page_size, state_table)
    return backend
