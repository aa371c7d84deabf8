"""Every GPU attention backend against float64, over the CPU backends' cases and long contexts.

`attention_error` derives what each case may differ by. `TRITON_INTERPRET=1` runs our own backend on
a CPU, but not in bfloat16.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from helpers.attention_cases import (
    BOUNDED,
    CASES,
    TWO_WAY,
    Case,
    Step,
    Steps,
    is_countable,
    make_step,
)
from helpers.attention_error import count_keys, worst_miscount, worst_share
from helpers.gpu_batches import layer_on, make_backend, make_batch, make_shared_batch

pytest.importorskip("triton", reason="a CPU build of torch brings none")

from minisgl.attention import (
    BaseAttnBackend,
    BaseAttnMetadata,
    create_attention_backend,
    cuda,
)
from minisgl.attention.base import SINKS, SOFTCAP
from minisgl.attention.paged import PagedAttnBackend
from minisgl.attention.triton_backend import TritonAttnBackend
from minisgl.core import PoolBatch
from minisgl.engine.device import StepSize
from minisgl.errors import ConfigError
from minisgl_kernels.ops import TunedOps

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
    Case(name="one long among many", head_dim=128, num_q_heads=16, num_kv_heads=8,
         rows=(*((7 * i, 7 * i + 1) for i in range(60)), (19_999, 20_000))),
    Case(name="300 rows", rows=tuple((3 * i, 3 * i + 1) for i in range(300)), head_dim=128),
    Case(name="8 heads share", rows=((900, 901), (0, 300)), num_q_heads=16, head_dim=128),
    Case(name="page of 64", rows=((900, 901), (0, 300), (130, 400)), page_size=64, head_dim=128),
    Case(name="40,000 keys, head dim 256", rows=ENDS, num_q_heads=16, num_kv_heads=2, head_dim=256),
    Case(name="head dim 256, window 1,000", rows=ENDS[7:], head_dim=256, window=1000),
    *(
        Case(name=f"head dim 512 in pages of {size}", rows=(*ENDS[-6:], (640, 705), (3, 1000)),
             num_q_heads=6, head_dim=512, page_size=size)
        for size in (8, 16, 128)
    ),
)  # fmt: skip
BOUNDED_LONG = (
    Case(name="40,000 keys, sinks", rows=ENDS, num_q_heads=16, num_kv_heads=2, sinks=True),
    Case(name="40,000 keys, sinks, window 128", rows=ENDS, num_q_heads=16, num_kv_heads=2,
         window=128, sinks=True),
    Case(name="300 rows, sinks", rows=tuple((3 * i, 3 * i + 1) for i in range(300)), sinks=True),
    Case(name="40,000 keys, softcap", rows=ENDS, num_kv_heads=4, head_dim=256, softcap=50.0),
)  # fmt: skip
TWO_WAY_LONG = (
    Case(name="images of 256 tokens, window 512", rows=((900, 901), (39_600, 40_000), (0, 700)),
         images=((1, 39_620, 39_876), (2, 10, 266), (2, 266, 522)), num_q_heads=8, num_kv_heads=4,
         head_dim=256, window=512),
    Case(name="images of 256 tokens", rows=((900, 901), (1800, 2300), (0, 700)),
         images=((1, 1700, 1956), (2, 10, 266), (2, 266, 522)), num_q_heads=16, num_kv_heads=8,
         head_dim=128),
)  # fmt: skip
PADDED_SIZE = StepSize(num_decodes=4, num_prompts=8, num_prompt_tokens=768, longest=8192)
PADDED = (
    ((900, 901), (1, 2), (130, 400), (63, 128), (0, 300)),
    ((897, 898), (0, 1), (131, 387), (60, 122), (1, 297)),  # in as many pages
)
GROUPED = {"num_q_heads": 16, "num_kv_heads": 8, "head_dim": 128}
FORMS: dict[str, dict[str, Any]] = {
    "grouped": GROUPED,
    "window": {**GROUPED, "window": 40},
    "latents": {"num_q_heads": 20, "num_kv_heads": 1, "head_dim": 576, "latent": 512},
}
COUNTED = [case for case in (*CASES, *LONG, *TWO_WAY, *TWO_WAY_LONG) if is_countable(case)]
BACKENDS = pytest.mark.parametrize(
    "name", ["triton", "fa", "fa2,triton", "triton,trtllm", "fi,triton"]
)
Tokens = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def named(value: object) -> str:
    return value.name if isinstance(value, Case) else str(value).removeprefix("torch.")


def pad_tokens(x: torch.Tensor, num_decodes: int, size: StepSize, value: float) -> torch.Tensor:
    """Return the tokens of decodes, their padding, prompts, their padding."""
    padded = torch.full((size.num_tokens, *x.shape[1:]), value, dtype=x.dtype, device=x.device)
    padded[:num_decodes] = x[:num_decodes]
    padded[size.num_decodes :][: len(x) - num_decodes] = x[num_decodes:]
    return padded


def prepare_padded(backend: BaseAttnBackend) -> BaseAttnMetadata:
    size = PADDED_SIZE
    return backend.prepare_any(size.num_prompts, size.num_prompt_tokens, size.longest)


def make_padded(
    step: Step, backend: BaseAttnBackend, device: torch.device
) -> tuple[PoolBatch, Tokens]:
    """The step's batch as a graph of PADDED_SIZE has it, and its q, k and v."""
    batch, size = make_batch(step, backend, device), PADDED_SIZE
    assert batch.rows is not None
    num_decodes = batch.rows.shape[1] - batch.attn_metadata.all.num_rows
    extra = size.num_decodes - num_decodes
    rows = torch.zeros(4, size.num_rows, dtype=torch.int32, device=device)
    rows[:, :num_decodes] = batch.rows[:, :num_decodes]
    rows[1, num_decodes : size.num_decodes] = torch.arange(num_decodes, size.num_decodes)
    rows[2:, num_decodes : size.num_decodes] = 1
    prompts = batch.rows[:, num_decodes:]
    rows[:, size.num_decodes :][:, : prompts.shape[1]] = prompts
    rows[1, size.num_decodes :] += extra
    rows[1, size.num_decodes + prompts.shape[1] :] = len(step.q) + extra
    batch.context.page_table[0] = 0  # padding's
    padded = dataclasses.replace(
        batch,
        slots=pad_tokens(batch.slots, num_decodes, size, -1),
        rows=rows,
        attn_metadata=prepare_padded(backend),
    )
    q, k, v = (pad_tokens(x.to(device), num_decodes, size, 1) for x in (step.q, step.k, step.v))
    return padded, (q, k, v)


def check_padded(out: torch.Tensor, step: Step, num_decodes: int) -> None:
    first, count = PADDED_SIZE.num_decodes, len(step.q) - num_decodes
    own = torch.cat((out[:num_decodes], out[first : first + count]))
    share = worst_share(own, step)
    assert share <= 1, f"{share:.2f} of the error that rounding explains"
    assert not out[first + count :].any()


def attend(step: Step, backend: BaseAttnBackend, device: torch.device) -> torch.Tensor:
    q, k, v = (x.to(device) for x in (step.q, step.k, step.v))
    out = backend.forward(q, k, v, layer_on(step, device), make_batch(step, backend, device))
    assert out.dtype == step.q.dtype
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=named)
@pytest.mark.parametrize(
    "case", [*CASES, *BOUNDED, *LONG, *BOUNDED_LONG, *TWO_WAY, *TWO_WAY_LONG], ids=named
)
@BACKENDS
def test_rounding_explains_the_error(
    name: str, case: Case, dtype: torch.dtype, device: torch.device
) -> None:
    backend = make_backend(name, case, dtype, device)
    step = make_step(case, dtype, "torch")
    share = worst_share(attend(step, backend, device), step)
    assert share <= 1, f"{share:.2f} of the error that rounding explains"


@pytest.mark.parametrize("dtype", DTYPES, ids=named)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["triton", "fa"])
def test_a_captured_step_attends_for_others_of_its_size(
    name: str, form: str, dtype: torch.dtype, device: torch.device
) -> None:
    """Padded to more rows and tokens, then with what another step has in the same tensors."""
    first, second = (Case(name="padded", rows=rows, **FORMS[form]) for rows in PADDED)
    backend = make_backend(name, first, dtype, device)
    assert isinstance(backend, PagedAttnBackend)
    step, other = make_step(first, dtype, "torch"), make_step(second, dtype, "torch", seed=1)
    batch, (q, k, v) = make_padded(step, backend, device)
    out = torch.empty_like(q[..., : first.latent])

    def attend_again() -> None:
        metadata = prepare_padded(backend)
        fresh = dataclasses.replace(batch, attn_metadata=metadata)
        out.copy_(backend.attend(q, k, v, layer_on(step, device), fresh))

    store = batch.context.kv_pool.layer(1)
    backend.ops.store_kv(k, v, batch.slots, store)
    attend_again()
    check_padded(out, step, num_decodes=2)
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            attend_again()
        attend_again = graph.replay
    new_batch, new_tokens = make_padded(other, backend, device)
    olds, news = (*tensors_of(batch), q, k, v), (*tensors_of(new_batch), *new_tokens)
    for old, new in zip(olds, news, strict=True):
        old.copy_(new)
    backend.ops.store_kv(k, v, batch.slots, store)
    attend_again()
    check_padded(out, other, num_decodes=2)


def tensors_of(batch: PoolBatch) -> list[torch.Tensor]:
    """Return the tensors that change from step to step, and the cache."""
    assert batch.rows is not None
    pool = batch.context.kv_pool.layer(1)
    return [batch.rows, batch.slots, batch.context.page_table, pool.k, pool.v]


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
@pytest.mark.parametrize("normed", ["", "qk", "qkv"])
@pytest.mark.parametrize("head_dim", [16, 64, 128, 512])
@pytest.mark.parametrize("num_rows", [6, 48])  # of few, and of many pairs of rows and heads
@BACKENDS
def test_decode_that_norms_rotates_and_stores(
    name: str, num_rows: int, head_dim: int, normed: str, dtype: torch.dtype, device: torch.device
) -> None:
    ends = (1, 6, 41, 301, 901, 3001) * (num_rows // 6)
    case = Case(
        name="decode", rows=tuple((end - 1, end) for end in ends), num_q_heads=16, num_kv_heads=2,
        head_dim=head_dim,
    )  # fmt: skip
    check_decode_qkv(name, case, normed, dtype, device)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=named)
@pytest.mark.parametrize("normed", ["", "qk"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("heads", "ends"),
    [
        *(((16, 8), (end,)) for end in (1, 2, 16, 17, 640, 1024, 1025, 3000, 40_000)),
        *(((2, 1), (end,)) for end in (130, 3000, 40_000)),
        ((40, 8), (640, 5000)),
        ((16, 1), (1, 40_000)),
        ((32, 4), (300, 20_000, 2049)),
        ((16, 8), (5, 600, 3000, 20_000, 1, 129, 64)),
    ],
    ids=str,
)
@pytest.mark.parametrize("bounds", [{}, {"window": 100}, {"window": 128, "sinks": True}], ids=str)
def test_decode_of_few_rows(
    bounds: dict[str, Any], heads: tuple[int, int], ends: tuple[int, ...], head_dim: int,
    normed: str, dtype: torch.dtype, device: torch.device,
) -> None:  # fmt: skip
    """From one key to more than the blocks of one cluster read at once."""
    case = Case(
        name="few", rows=tuple((end - 1, end) for end in ends), num_q_heads=heads[0],
        num_kv_heads=heads[1], head_dim=head_dim, **bounds,
    )  # fmt: skip
    check_decode_qkv("triton", case, normed, dtype, device)


def check_decode_qkv(
    name: str, case: Case, normed: str, dtype: torch.dtype, device: torch.device
) -> None:
    """Check a decode step that gets q, k and v as they were projected, twice in a row.

    No rounding is in its norms and rotations: elements of one magnitude, weights of powers of 2,
    quarter turns.
    """
    head_dim = case.head_dim
    num_heads = case.num_q_heads + case.num_kv_heads
    longest = max(end for _, end in case.rows)
    backend = make_backend(name, case, dtype, device)
    step = make_step(case, dtype, "torch")
    gen = torch.Generator().manual_seed(1)

    def draw(values: list[float], *shape: int) -> torch.Tensor:
        return torch.tensor(values)[torch.randint(len(values), shape, generator=gen)]

    cos, sin = torch.tensor([(1, 0), (0, 1), (-1, 0), (0, -1)]).float().T
    turns = torch.randint(4, (longest, head_dim // 2), generator=gen)
    weights = draw([0.5, 1.0, 2.0], 2, head_dim).to(dtype)
    steps = Steps(
        layer=layer_on(step, device),
        q_norm_weight=weights[0] if normed else None,
        k_norm_weight=weights[1] if normed else None,
        norm_eps=1e-6,  # nothing, when 16 bits are left of it
        cos_sin=torch.cat((cos[turns], sin[turns]), -1),
        norms_values="v" in normed,
    )
    qk = draw([-2.0, 2.0], len(step.q), num_heads * head_dim)
    values = draw([-2.0, 2.0], *step.v.shape).to(dtype) if steps.norms_values else step.v
    qkv = torch.cat((qk.to(dtype), values.flatten(1)), -1)
    q, k, v = steps.split(qkv, step.batch.positions)
    step.q.copy_(q)
    step.v.copy_(v)
    for row, (keys, values) in enumerate(step.contexts):
        keys[-1], values[-1] = k[row], v[row]

    batch = make_batch(step, backend, device)
    on_device = dataclasses.replace(
        steps,
        q_norm_weight=weights[0].to(device) if normed else None,
        k_norm_weight=weights[1].to(device) if normed else None,
        cos_sin=steps.cos_sin.to(device),
    )
    for _ in range(2):  # what the first run leaves must not be read by the second
        out = backend.forward_qkv(qkv.to(device), on_device, batch)
        share = worst_share(out.view(step.q.shape), step)
        assert share <= 1, f"{share:.2f} of the error that rounding explains"
    pool, slots = batch.context.kv_pool.layer(1), step.batch.slots
    assert torch.equal(pool.k.flatten(0, 1)[slots].cpu(), k)
    assert torch.equal(pool.v.flatten(0, 1)[slots].cpu(), step.v)


@pytest.mark.parametrize("dtype", DTYPES, ids=named)
@pytest.mark.parametrize(("num_rows", "shared"), [(5, 512), (70, 256), (5, 2048)])
@pytest.mark.parametrize(("heads", "dim"), [((16, 8), 128), ((10, 2), 128), ((4, 2), 256)])
def test_decode_of_a_common_prefix(
    heads: tuple[int, int], dim: int, num_rows: int, shared: int, dtype: torch.dtype,
    device: torch.device,
) -> None:  # fmt: skip
    ends = [shared + 1 + 13 * i * i % 700 for i in range(num_rows)]
    case = Case(
        name="shared", rows=tuple((end - 1, end) for end in ends), num_q_heads=heads[0],
        num_kv_heads=heads[1], head_dim=dim,
    )  # fmt: skip
    backend = make_backend("triton", case, dtype, device)
    step = make_step(case, dtype, "torch")
    batch = make_shared_batch(step, shared, backend, device)
    q, k, v = (x.to(device) for x in (step.q, step.k, step.v))
    share = worst_share(backend.forward(q, k, v, layer_on(step, device), batch), step)
    assert share <= 1, f"{share:.2f} of the error that rounding explains"


def test_padding_rows_beside_a_common_prefix(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have no keys of their own; their output must be finite."""
    case = Case(name="padded", rows=((511, 512), (0, 1)), num_q_heads=16, head_dim=128)
    backend = make_backend("triton", case, torch.float16, device)
    assert isinstance(backend, PagedAttnBackend)
    step = make_step(case, torch.float16, "torch")
    batch = make_batch(step, backend, device)
    shared = torch.tensor([256], dtype=torch.int32, device=device)
    q, k, v = (x.to(device) for x in (step.q, step.k, step.v))
    monkeypatch.setattr(torch, "empty_like", lambda x: torch.full_like(x, float("nan")))
    out = backend.forward(
        q, k, v, layer_on(step, device), dataclasses.replace(batch, common_prefix=shared)
    )
    assert out.isfinite().all()


@pytest.mark.parametrize(
    ("name", "needs", "message"),
    [
        ("fi,triton", (SINKS,), "'fi' has no sinks, which this model needs; choose --attn triton"),
        ("fa2,triton", (SINKS, SOFTCAP), "'fa2' has no sinks and no softcap"),
        ("fa", (SOFTCAP,), "'fa' has no softcap"),
        ("triton,trtllm", (SINKS,), "'trtllm' has no sinks"),
        ("fa", (SINKS,), "'fa' takes sinks only in bfloat16; here is float16"),
    ],
)
def test_a_backend_that_lacks_a_need_of_the_model_is_refused(
    name: str, needs: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(cuda, "num_cores", lambda _: 132)
    monkeypatch.setattr(
        cuda, "TritonAttnBackend", lambda ops, *_: TritonAttnBackend(ops, 132, torch.device("cpu"))
    )

    def create(name: str) -> BaseAttnBackend:
        device = torch.device("cuda")
        return create_attention_backend(name, TunedOps(), device, dtype=torch.float16, needs=needs)

    with pytest.raises(ConfigError, match=message):
        create(name)
    assert create("auto").name == "triton"
