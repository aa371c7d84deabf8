"""Every GPU attention backend against float64, over the CPU backends' cases and long contexts.

`attention_error` derives what each case may differ by. `TRITON_INTERPRET=1` runs our own backend on
a CPU, but not in bfloat16.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from attention_error import count_keys, worst_miscount, worst_share
from test_backends import CASES, Case, Step, Steps, is_countable, make_step

pytest.importorskip("triton")

from minisgl.attention import BaseAttnBackend, create_attention_backend
from minisgl.attention.triton_backend import TritonAttnBackend
from minisgl.core import Batch, Context
from minisgl.errors import ConfigError
from minisgl.kernel.cuda import CudaOps
from minisgl.kvcache.pool import LayerPool

ENDS = (
    (900, 901), (1, 2), (39_999, 40_000), (15, 16), (16, 17), (64, 65), (0, 1),
    (130, 400), (39_960, 40_000), (63, 128), (48, 80), (0, 300),
)  # fmt: skip
LONG = (
    *(
        Case(name=f"40,000 keys in pages of {size}", rows=ENDS, num_q_heads=16, num_kv_heads=8,
             head_dim=128, page_size=size)
        for size in (1, 16, 64)
    ),
    Case(name="40,000 keys, window 1,000", rows=ENDS[2:10], head_dim=128, window=1000),
    Case(name="some rows", rows=tuple((37 * i, 37 * i + 1) for i in range(40)), head_dim=128),
    Case(name="many rows", rows=tuple((7 * i, 7 * i + 1) for i in range(150)), num_q_heads=16,
         num_kv_heads=8, head_dim=128),
    Case(name="8 heads share", rows=((900, 901), (0, 300)), num_q_heads=16, head_dim=128),
    Case(name="page of 64", rows=((900, 901), (0, 300), (130, 400)), page_size=64, head_dim=128),
)  # fmt: skip
COUNTED = [case for case in (*CASES, *LONG) if is_countable(case)]
BACKENDS = pytest.mark.parametrize("name", ["triton", "fa", "triton,trtllm", "fi,triton"])
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def named(value: object) -> str:
    return value.name if isinstance(value, Case) else str(value).removeprefix("torch.")


class _Pool:
    def __init__(self, layers: list[LayerPool], page_size: int) -> None:
        self._layers, self.page_size = layers, page_size

    def layer(self, layer_id: int) -> LayerPool:
        return self._layers[layer_id]


def make_backend(
    name: str, case: Case, dtype: torch.dtype, device: torch.device
) -> BaseAttnBackend:
    """Skips what the backend says that it does not take."""
    if device.type == "cpu":
        if name != "triton" or dtype == torch.bfloat16:
            pytest.skip("Triton's interpreter runs our kernels alone, and bfloat16 wrong")
        return TritonAttnBackend(CudaOps(), 132, device)
    try:
        return create_attention_backend(
            name, CudaOps(), device, dtype=dtype, head_dim=case.head_dim,
            page_size=case.page_size,
        )  # fmt: skip
    except ConfigError as error:
        pytest.skip(str(error))


def make_batch(step: Step, backend: BaseAttnBackend, device: torch.device) -> Batch:
    """The step's, on the device; its first one-token rows decode."""
    starts, ends = np.array(step.plan.starts), np.array(step.plan.ends)
    lengths = ends - starts
    num_decodes = int((np.cumsum(lengths != 1) == 0).sum())
    plan = dataclasses.replace(step.plan, num_decodes=num_decodes)
    rows = np.stack((plan.table_idxs, np.cumsum(lengths) - lengths, lengths, ends))
    old = step.batch.context
    layers = [
        LayerPool(k=old.kv_pool.layer(i).k.to(device), v=old.kv_pool.layer(i).v.to(device))
        for i in range(2)
    ]
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
    )


def attend(step: Step, backend: BaseAttnBackend, device: torch.device) -> torch.Tensor:
    q, k, v = (x.to(device) for x in (step.q, step.k, step.v))
    out = backend.forward(q, k, v, step.layer, make_batch(step, backend, device))
    assert out.dtype == step.q.dtype
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=named)
@pytest.mark.parametrize("case", [*CASES, *LONG], ids=named)
@BACKENDS
def test_rounding_explains_the_error(
    name: str, case: Case, dtype: torch.dtype, device: torch.device
) -> None:
    backend = make_backend(name, case, dtype, device)
    step = make_step(case, dtype, "torch")
    share = worst_share(attend(step, backend, device), step)
    assert share <= 1, f"{share:.2f} of the error that rounding explains"


@pytest.mark.parametrize("dtype", DTYPES, ids=named)
@pytest.mark.parametrize("case", COUNTED, ids=named)
@BACKENDS
def test_each_key_counts_once(
    name: str, case: Case, dtype: torch.dtype, device: torch.device
) -> None:
    backend = make_backend(name, case, dtype, device)
    step = make_step(case, dtype, "torch")
    count_keys(step)
    miscount = worst_miscount(attend(step, backend, device), step)
    assert miscount < 0.5, f"off by {miscount:.2f} keys"


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=named)
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("head_dim", [64, 128])
@BACKENDS
def test_decode_that_norms_rotates_and_stores(
    name: str, head_dim: int, normed: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """Where no rounding is: elements of one magnitude, weights of powers of 2, quarter turns."""
    case = Case(
        name="decode", rows=tuple((end - 1, end) for end in (1, 6, 41, 301, 901, 3001)),
        num_q_heads=16, num_kv_heads=2, head_dim=head_dim,
    )  # fmt: skip
    backend = make_backend(name, case, dtype, device)
    step = make_step(case, dtype, "torch")
    gen = torch.Generator().manual_seed(1)

    def draw(values: list[float], *shape: int) -> torch.Tensor:
        return torch.tensor(values)[torch.randint(len(values), shape, generator=gen)]

    cos, sin = torch.tensor([(1, 0), (0, 1), (-1, 0), (0, -1)]).float().T
    turns = torch.randint(4, (3001, head_dim // 2), generator=gen)
    weights = draw([0.5, 1.0, 2.0], 2, head_dim).to(dtype)
    steps = Steps(
        layer=step.layer,
        q_norm_weight=weights[0] if normed else None,
        k_norm_weight=weights[1] if normed else None,
        norm_eps=1e-6,  # nothing, when 16 bits are left of it
        cos_sin=torch.cat((cos[turns], sin[turns]), -1),
    )
    qk = draw([-2.0, 2.0], len(step.q), 18 * head_dim)
    qkv = torch.cat((qk.to(dtype), step.v.flatten(1)), -1)
    q, k, _ = steps.split(qkv, step.batch.positions)
    step.q.copy_(q)
    for row, (keys, _) in enumerate(step.contexts):
        keys[-1] = k[row]

    batch = make_batch(step, backend, device)
    on_device = dataclasses.replace(
        steps,
        q_norm_weight=weights[0].to(device) if normed else None,
        k_norm_weight=weights[1].to(device) if normed else None,
        cos_sin=steps.cos_sin.to(device),
    )
    out = backend.forward_qkv(qkv.to(device), on_device, batch)
    share = worst_share(out.view(step.q.shape), step)
    assert share <= 1, f"{share:.2f} of the error that rounding explains"
    pool, slots = batch.context.kv_pool.layer(1), step.batch.slots
    assert torch.equal(pool.k.flatten(0, 1)[slots].cpu(), k)
    assert torch.equal(pool.v.flatten(0, 1)[slots].cpu(), step.v)


@pytest.mark.parametrize("dtype", DTYPES, ids=named)
@pytest.mark.parametrize(("num_rows", "shared"), [(5, 512), (70, 256), (5, 2048)])
@pytest.mark.parametrize("heads", [(16, 8), (10, 2)])
def test_decode_of_a_shared_beginning(
    heads: tuple[int, int], num_rows: int, shared: int, dtype: torch.dtype, device: torch.device
) -> None:
    ends = [shared + 1 + 13 * i * i % 700 for i in range(num_rows)]
    case = Case(
        name="shared", rows=tuple((end - 1, end) for end in ends), num_q_heads=heads[0],
        num_kv_heads=heads[1], head_dim=128,
    )  # fmt: skip
    backend = make_backend("triton", case, dtype, device)
    step = make_step(case, dtype, "torch")
    table = step.batch.context.page_table
    table[step.plan.table_idxs, : shared // 16] = table[step.plan.table_idxs[0], : shared // 16]
    for row in step.contexts[1:]:
        for x, first in zip(row, step.contexts[0], strict=True):
            x[:shared] = first[:shared]
    batch = make_batch(step, backend, device)
    batch = dataclasses.replace(
        batch, shared=torch.tensor([shared], dtype=torch.int32, device=device)
    )
    q, k, v = (x.to(device) for x in (step.q, step.k, step.v))
    share = worst_share(backend.forward(q, k, v, step.layer, batch), step)
    assert share <= 1, f"{share:.2f} of the error that rounding explains"
