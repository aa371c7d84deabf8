"""The backend of recurrent layers, by the name of the model's attention backend; that in C++ is in
`kernel/csrc/recurrent.cpp`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minisgl import plugins
from minisgl.core import PoolBatch
from minisgl.kernel.jit import load_library
from minisgl.kernel.once import JitUnavailable
from minisgl.utils.logger import get_logger
from minisgl_zoo.recurrent.backend import (
    DeltaLayer,
    RecurrentBackend,
    RecurrentInputs,
    TorchRecurrentBackend,
)
from minisgl_zoo.recurrent.pool import RecurrentPool

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


class CpuRecurrentBackend(RecurrentBackend):
    name = "cpu"

    def __init__(self, library: Any, page_size: int, state_table: Tensor) -> None:
        """`library` is what `minisgl.kernel.jit.load_library` returned."""
        super().__init__(page_size, state_table)
        self._step = library.recurrent_step

    def forward(self, inputs: RecurrentInputs, layer: DeltaLayer, batch: PoolBatch) -> Tensor:
        pool: RecurrentPool = batch.context.kv_pool
        cache, x_TD = pool.layer(layer.layer_id), inputs.x_TD
        out_TNV = torch.empty(len(x_TD), layer.num_heads, layer.value_dim, dtype=x_TD.dtype)
        self._step(
            x_TD,
            torch.empty(x_TD.shape, dtype=x_TD.dtype),
            inputs.g_TN,
            inputs.beta_TN,
            inputs.weight_WD,
            inputs.bias_D,
            inputs.skip_N,
            cache.states,
            cache.tails,
            cache.inputs,
            cache.keys,
            cache.updates,
            cache.decays,
            batch.slots,
            batch.context.page_table,
            self.state_table,
            batch.attn_metadata.rows,
            out_TNV,
            layer.interval,
            self.page_size,
            torch.get_num_threads(),
        )
        return out_TNV
