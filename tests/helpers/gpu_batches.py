"""Batches of attention cases, on a device."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from helpers.attention_cases import Case, Sinks, Step
from minisgl.attention import AttnLayer, BaseAttnBackend, create_attention_backend
from minisgl.attention.base import LATENTS, SINKS, SOFTCAP
from minisgl.core import Context, PoolBatch
from minisgl.errors import ConfigError
from minisgl.kvcache.pool import LayerPool


class _Pool:
    def __init__(self, layers: list[LayerPool], page_size: int) -> None:
        self._layers, self.page_size = layers, page_size

    def layer(self, layer_id: int) -> LayerPool:
        return self._layers[layer_id]


def layer_to(layer: LayerPool, device: torch.device) -> LayerPool:
    tensors = {
        field.name: x.to(device)
        for field in dataclasses.fields(layer)
        if (x := getattr(layer, field.name)) is not None
    }
    if layer.v.data_ptr() == layer.k.data_ptr():  # of latents
        tensors["v"] = tensors["k"]
    return dataclasses.replace(layer, **tensors)


def layer_on(step: Step, device: torch.device) -> AttnLayer:
    """Return the step's layer with its sinks on the device."""
    sinks = step.layer.sinks
    return dataclasses.replace(step.layer, sinks=sinks and Sinks(sinks.weight.to(device)))


def make_backend(
    name: str, case: Case, dtype: torch.dtype, device: torch.device
) -> BaseAttnBackend:
    """Return the backend for the case. Skips what it refuses."""
    from minisgl.attention.triton_backend import TritonAttnBackend
    from minisgl_kernels.ops import TunedOps

    if device.type == "cpu":
        if name != "triton" or dtype == torch.bfloat16:
            pytest.skip("Triton's interpreter runs our kernels alone, and bfloat16 wrong")
        return TritonAttnBackend(TunedOps(), 132, device)
    needs = ((SINKS, case.sinks), (SOFTCAP, case.softcap), (LATENTS, case.latent))
    try:
        backend = create_attention_backend(
            name, TunedOps(), device, dtype=dtype, head_dim=case.head_dim, latent=case.latent,
            page_size=case.page_size, needs=[need for need, has in needs if has],
        )  # fmt: skip
    except ConfigError as error:  # the sentence that a start would end with: the reason
        pytest.skip(str(error))
    if case.images and not backend.takes_two_way:
        pytest.skip(f"{name} does not attend both ways")
    return backend


def make_batch(step: Step, backend: BaseAttnBackend, device: torch.device) -> PoolBatch:
    """Return the step's batch on the device; its first one-token rows decode."""
    starts, ends = np.array(step.plan.starts), np.array(step.plan.ends)
    lengths = ends - starts
    num_decodes = int((np.cumsum(lengths != 1) == 0).sum())
    plan = dataclasses.replace(step.plan, num_decodes=num_decodes)
    rows = np.stack((plan.table_idxs, np.cumsum(lengths) - lengths, lengths, ends))
    old, key_ends = step.batch.context, step.batch.key_ends
    layers = [layer_to(old.kv_pool.layer(i), device) for i in range(2)]
    return dataclasses.replace(
        step.batch,
        positions=step.batch.positions.to(device),
        slots=step.batch.slots.to(device),
        rows=torch.from_numpy(rows.astype(np.int32)).to(device),
        attn_metadata=backend.prepare(plan),
        context=Context(
            kv_pool=_Pool(layers, layers[0].k.shape[1]),
            page_table=old.page_table.to(device),
            attn=backend,
        ),
        key_ends=None if key_ends is None else key_ends.to(device),
    )


def make_shared_batch(
    step: Step, num_tokens: int, backend: BaseAttnBackend, device: torch.device
) -> PoolBatch:
    """Give all rows the first `num_tokens` tokens of the first row's context, in whole pages of 16,
    which changes the step. Returns its batch, as `make_batch` does."""
    table, rows = step.batch.context.page_table, step.plan.table_idxs
    table[rows, : num_tokens // 16] = table[rows[0], : num_tokens // 16]
    for row in step.contexts[1:]:
        for x, first in zip(row, step.contexts[0], strict=True):
            x[:num_tokens] = first[:num_tokens]
    common = torch.tensor([num_tokens], dtype=torch.int32, device=device)
    return dataclasses.replace(make_batch(step, backend, device), common_prefix=common)
