"""Triton's attention over caches of 8 bits, against float64 on the numbers that the cache holds.

`TRITON_INTERPRET=1` runs these on a CPU. `test_the_bound_sees_a_wrong_scale` gives each head its
neighbour's scale, and must fail the bound.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("triton", reason="a CPU build of torch brings none")

from torch import Tensor

from helpers.attention_cases import BOUNDED, CASES, LATENTS, MIXED, Case, Step, Steps, make_step
from helpers.attention_error import worst_share
from helpers.gpu_batches import layer_on, make_batch, make_shared_batch
from helpers.quantised_kv import FP8, KV_DTYPES, bits, put
from minisgl.attention import create_attention_backend
from minisgl.attention.triton_backend import TritonAttnBackend
from minisgl.core import PoolBatch
from minisgl.errors import ConfigError
from minisgl.kvcache.pool import LayerPool
from minisgl_kernels.ops import TunedOps

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
KV = pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=lambda dtype: str(dtype)[6:])
ALL = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
SAMPLE = [
    case
    for case in (*CASES, *BOUNDED, *LATENTS)
    if case.name
    in {
        "mixed", "one long row", "page of 7", "7 heads share", "head dim 20", "head dim 128",
        "head dim 256", "window 24", "long prefill", "sinks, window 24", "softcap",
        "latents", "latents of 20",
    }
]  # fmt: skip


def make_backend(
    dtype: torch.dtype, kv_dtype: torch.dtype, device: torch.device
) -> TritonAttnBackend:
    if device.type == "cpu":
        if dtype == torch.bfloat16:
            pytest.skip("Triton's interpreter takes bfloat16 for integers")
        return TritonAttnBackend(TunedOps(), 132, device)
    if kv_dtype == FP8 and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no fp8")
    return TritonAttnBackend(
        TunedOps(), torch.cuda.get_device_properties(device).multi_processor_count, device
    )


def tokens_of(step: Step, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    return step.q.to(device), step.k.to(device), step.v.to(device)


def pool_of(batch: PoolBatch) -> LayerPool:
    layer: LayerPool = batch.context.kv_pool.layer(1)
    return layer


def fill(step: Step) -> None:
    """Store the step's own keys and values in its pool, on the CPU."""
    taken = step.batch.slots >= 0
    put(pool_of(step.batch), step.batch.slots[taken], step.k[taken], step.v[taken])


@ALL
@pytest.mark.parametrize("case", SAMPLE, ids=lambda case: case.name)
@KV
def test_rounding_explains_the_error(
    kv_dtype: torch.dtype, case: Case, dtype: torch.dtype, device: torch.device
) -> None:
    """Stored bits are those of the oracle, in the step's slots; all others stay as they are."""
    backend = make_backend(dtype, kv_dtype, device)
    step = make_step(case, dtype, "torch", kv_dtype=kv_dtype)
    step.k[0, 0] = 0  # takes the scale 1
    if step.plan.starts[0] + 1 == step.plan.ends[0]:
        step.contexts[0][0][-1, 0] = 0
    else:
        step.contexts[0][0][step.plan.starts[0], 0] = 0
    batch = make_batch(step, backend, device)
    q, k, v = tokens_of(step, device)
    out = backend.forward(q, k, v, layer_on(step, device), batch)
    assert out.dtype == dtype
    share = worst_share(out, step)
    assert share <= 1, f"{share:.2f} of the error that rounding explains"
    fill(step)
    for got, want in zip(bits(pool_of(batch)), bits(pool_of(step.batch)), strict=True):
        assert torch.equal(got, want)


@KV
def test_the_bound_sees_a_wrong_scale(kv_dtype: torch.dtype, device: torch.device) -> None:
    backend = make_backend(torch.float16, kv_dtype, device)
    for of_keys in (True, False):
        step = make_step(CASES[2], torch.float16, "torch", kv_dtype=kv_dtype)
        fill(step)
        step.batch.slots.fill_(-1)
        batch = make_batch(step, backend, device)
        scale = pool_of(batch).k_scale if of_keys else pool_of(batch).v_scale
        assert scale is not None
        scale.copy_(scale.flip(-1))
        out = backend.forward(*tokens_of(step, device), layer_on(step, device), batch)
        assert worst_share(out, step) > 3


@KV
def test_nan_that_a_query_sees_is_not_hidden(kv_dtype: torch.dtype, device: torch.device) -> None:
    if kv_dtype == FP8 and device.type == "cpu":
        pytest.skip("Triton's interpreter reads the NaN of e4m3 as 384")
    backend = make_backend(torch.float16, kv_dtype, device)
    case = Case(name="nan", rows=((90, 91), (0, 40)))
    step = make_step(case, torch.float16, "torch", kv_dtype=kv_dtype)
    step.k[6] = torch.nan
    batch = make_batch(step, backend, device)
    out = backend.forward(*tokens_of(step, device), layer_on(step, device), batch)
    assert out[6:].isnan().all()
    assert out[0].isfinite().all()


@ALL
@pytest.mark.parametrize(("num_rows", "shared"), [(5, 512), (70, 256)])
@KV
def test_decode_of_a_common_prefix(
    kv_dtype: torch.dtype, num_rows: int, shared: int, dtype: torch.dtype, device: torch.device
) -> None:
    ends = [shared + 1 + 13 * i * i % 700 for i in range(num_rows)]
    case = Case(
        name="shared", rows=tuple((end - 1, end) for end in ends), num_q_heads=10, num_kv_heads=2,
        head_dim=128,
    )  # fmt: skip
    backend = make_backend(dtype, kv_dtype, device)
    step = make_step(case, dtype, "torch", kv_dtype=kv_dtype)
    batch = make_shared_batch(step, shared, backend, device)
    out = backend.forward(*tokens_of(step, device), layer_on(step, device), batch)
    share = worst_share(out, step)
    assert share <= 1, f"{share:.2f} of the error that rounding explains"


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("rows", [((0, 1), (5, 6), (300, 301), (3000, 3001)), MIXED], ids=len)
@pytest.mark.parametrize(("head_dim", "rotary"), [(64, 64), (128, 128), (80, 32)])
@KV
def test_fused_kernels_norm_rotate_and_store(
    kv_dtype: torch.dtype, head_dim: int, rotary: int, rows: tuple[tuple[int, int], ...],
    dtype: torch.dtype, device: torch.device,
) -> None:  # fmt: skip
    """The fused kernels, of decode alone and of a mixed step, where no rounding is: elements of one
    magnitude and quarter turns. Values are random."""
    case = Case(name="fused", rows=rows, num_q_heads=16, num_kv_heads=2, head_dim=head_dim)
    backend = make_backend(dtype, kv_dtype, device)
    step = make_step(case, dtype, "torch", kv_dtype=kv_dtype)
    gen = torch.Generator().manual_seed(1)
    cos, sin = torch.tensor([(1, 0), (0, 1), (-1, 0), (0, -1)]).float().T
    turns = torch.randint(4, (3001, rotary // 2), generator=gen)
    weights = torch.tensor([0.5, 1.0, 2.0])[torch.randint(3, (2, head_dim), generator=gen)]
    cos_sin = torch.cat((cos[turns], sin[turns]), -1)
    steps = Steps(
        layer=layer_on(step, device), q_norm_weight=weights[0].to(dtype),
        k_norm_weight=weights[1].to(dtype), norm_eps=1e-6, cos_sin=cos_sin,
    )  # fmt: skip
    qk = torch.randint(2, (len(step.q), 18 * head_dim), generator=gen) * 4.0 - 2.0
    qkv = torch.cat((qk.to(dtype), step.v.flatten(1)), -1)
    q, k, _ = steps.split(qkv, step.batch.positions)
    step.q.copy_(q)
    step.k.copy_(k)
    pool = pool_of(step.batch)
    offset = 0
    for (keys, _), start, end in zip(step.contexts, step.plan.starts, step.plan.ends, strict=True):
        fresh = put(pool, step.batch.slots[offset:][: end - start], k[offset:][: end - start],
                    step.v[offset:][: end - start])  # fmt: skip
        keys[start:] = fresh[0]
        offset += end - start
    stored = bits(pool)
    batch = make_batch(step, backend, device)  # with the step's keys and values: overwritten next
    for x in (pool_of(batch).k, pool_of(batch).v):
        x.flatten(0, 1)[step.batch.slots.to(device)] = 1
    on_device = dataclasses.replace(
        steps, q_norm_weight=weights[0].to(dtype).to(device),
        k_norm_weight=weights[1].to(dtype).to(device), cos_sin=cos_sin.to(device),
    )  # fmt: skip
    out = backend.forward_qkv(qkv.to(device), on_device, batch)
    share = worst_share(out.view(step.q.shape), step)
    assert share <= 1, f"{share:.2f} of the error that rounding explains"
    for got, want in zip(bits(pool_of(batch)), stored, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("window", [None, 40])
@KV
def test_a_captured_step_reads_the_pages_of_the_next(
    kv_dtype: torch.dtype, window: int | None, device: torch.device
) -> None:
    """Replayed with another step's pages, tokens and scales in the same tensors."""
    rows = ((900, 901), (63, 64), (130, 400), (0, 300))
    case = Case(
        name="graph", rows=rows, num_q_heads=16, num_kv_heads=8, head_dim=128, window=window
    )
    backend = make_backend(torch.float16, kv_dtype, device)
    steps = [make_step(case, torch.float16, "torch", seed, kv_dtype) for seed in (0, 1)]
    batch, other = (make_batch(step, backend, device) for step in steps)
    q, k, v = tokens_of(steps[0], device)
    out = torch.empty_like(q)

    def attend_again() -> None:
        metadata = backend.prepare(dataclasses.replace(steps[0].plan, num_decodes=2))
        fresh = dataclasses.replace(batch, attn_metadata=metadata)
        out.copy_(backend.forward(q, k, v, layer_on(steps[0], device), fresh))

    attend_again()
    assert worst_share(out, steps[0]) <= 1
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            attend_again()
        attend_again = graph.replay
    assert batch.rows is not None
    assert other.rows is not None
    ours, theirs = pool_of(batch), pool_of(other)
    pairs = [(batch.rows, other.rows), (batch.slots, other.slots)]
    pairs += [(batch.context.page_table, other.context.page_table)]
    pairs += list(zip((q, k, v), tokens_of(steps[1], device), strict=True))
    for name in ("k", "v", "k_scale", "v_scale"):
        pairs.append((getattr(ours, name), getattr(theirs, name)))
    for old, new in pairs:
        old.copy_(new)
    attend_again()
    assert worst_share(out, steps[1]) <= 1


@pytest.mark.parametrize(
    ("name", "capability", "kv_dtype", "message"),
    [
        ("fa", (9, 0), FP8, "'fa' does not read a KV cache of 8 bits .*; choose --attn triton"),
        ("fi,triton", (9, 0), torch.int8, "'fi' does not read a KV cache of 8 bits"),
        ("triton,trtllm", (9, 0), FP8, "'trtllm' does not read a KV cache of 8 bits"),
        ("auto", (8, 0), FP8, "needs a GPU of compute capability 8.9 or more; choose int8"),
    ],
)
def test_backends_that_do_not_read_8_bits_are_refused_by_name(
    name: str,
    capability: tuple[int, int],
    kv_dtype: torch.dtype,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr("minisgl.attention.cuda.num_cores", lambda _: 132)
    monkeypatch.setattr(
        "minisgl.attention.cuda.TritonAttnBackend",
        lambda ops, *_: TritonAttnBackend(ops, 132, torch.device("cpu")),
    )

    def create(name: str, dtype: torch.dtype) -> str:
        device = torch.device("cuda")
        return create_attention_backend(name, TunedOps(), device, dtype=dtype).name

    with pytest.raises(ConfigError, match=message):
        create(name, kv_dtype)
    assert create("auto", torch.int8) == "triton"
