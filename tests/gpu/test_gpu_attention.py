"""Every GPU attention backend against torch's SDPA in float64, over the CPU backends' cases."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from test_backends import CASES, TOLERANCE, Case, expected, make_step

pytest.importorskip("triton")

from minisgl.attention import create_attention_backend
from minisgl.core import Context
from minisgl.errors import ConfigError
from minisgl.kernel.registry import create_ops
from minisgl.kvcache.pool import LayerPool

LONG = (
    Case(name="40,000 keys", rows=((39_999, 40_000), (5, 6)), head_dim=128),
    Case(name="many rows", rows=tuple((7 * i, 7 * i + 1) for i in range(150)), head_dim=128),
    Case(name="8 heads share", rows=((900, 901), (0, 300)), num_q_heads=16, head_dim=128),
    Case(
        name="pages of 16",
        rows=((900, 901), (1, 2), (39_999, 40_000), (15, 16), (16, 17), (0, 300), (130, 400)),
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=128,
        page_size=16,
    ),
    Case(name="page of 64", rows=((900, 901), (0, 300), (130, 400)), page_size=64, head_dim=128),
)


class _Pool:
    def __init__(self, layers: list[LayerPool], page_size: int) -> None:
        self._layers, self.page_size = layers, page_size

    def layer(self, layer_id: int) -> LayerPool:
        return self._layers[layer_id]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("case", [*CASES, *LONG], ids=lambda case: case.name)
@pytest.mark.parametrize("name", ["triton", "fa", "triton,trtllm", "fi,triton"])
def test_backend_matches_sdpa(
    name: str, case: Case, dtype: torch.dtype, device: torch.device
) -> None:
    try:
        backend = create_attention_backend(
            name, create_ops(device), device, dtype=dtype, head_dim=case.head_dim,
            page_size=case.page_size,
        )  # fmt: skip
    except ConfigError as error:
        pytest.skip(str(error))  # what the backend says that it does not take
    step = make_step(case, dtype, "torch")
    starts, ends = np.array(step.plan.starts), np.array(step.plan.ends)
    lengths = ends - starts
    num_decodes = int((np.cumsum(lengths != 1) == 0).sum())  # the front of one-token rows
    plan = dataclasses.replace(step.plan, num_decodes=num_decodes)
    rows = np.stack((plan.table_idxs, np.cumsum(lengths) - lengths, lengths, ends))
    old = step.batch.context
    layers = [
        LayerPool(k=old.kv_pool.layer(i).k.to(device), v=old.kv_pool.layer(i).v.to(device))
        for i in range(2)
    ]
    batch = dataclasses.replace(
        step.batch,
        slots=step.batch.slots.to(device),
        rows=torch.from_numpy(rows.astype(np.int32)).to(device),
        attn_metadata=backend.prepare(plan),
        context=Context(
            kv_pool=_Pool(layers, case.page_size),
            page_table=old.page_table.to(device),
            attn=backend,
        ),
    )
    out = backend.forward(
        step.q.to(device), step.k.to(device), step.v.to(device), step.layer, batch
    )
    want = expected(step)
    error = (out.cpu().double() - want).abs().max() / want.abs().max()
    assert error <= TOLERANCE[dtype], f"relative error {error:.2e}"
