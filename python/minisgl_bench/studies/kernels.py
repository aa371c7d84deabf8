"""The C++ kernels beside plain torch, on this machine.

Rounds interleave ours and theirs; the speed-up is the median of the rounds' ratios, so a machine
that slows down affects both. The shapes are those of Qwen3-0.6B and of the built-in model's size
class.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.attention import AttnLayer, BaseAttnBackend, create_attention_backend
from minisgl.core import BatchSamplingArgs, Context, Plan, PoolBatch
from minisgl.kernel.ops import Ops
from minisgl.kernel.registry import create_ops
from minisgl.kvcache.pool import MHAKVCache
from minisgl_bench.arguments import add_json, benchmark_parser, natural
from minisgl_bench.floor import Shape
from minisgl_bench.report import machine_load, write_json
from minisgl_bench.shapes import SHAPES as MODELS
from minisgl_bench.shapes import shape_of

CPU = torch.device("cpu")
ROUND_S = (
    0.004  # one side of one round: long beside the clock's step, short beside changes of other load
)


SHAPES = {
    "0.6B": shape_of(MODELS["qwen3-0.6b"]),
    "tiny": Shape(
        hidden_size=256, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=64,
        intermediate_size=768, vocab_size=2048,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Median times in microseconds. speedup: the median of the rounds' ratios theirs / ours."""

    name: str
    dtype: str
    ours_us: float
    theirs_us: float
    speedup: float


def _once(run: Callable[[], object], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        run()
    return (time.perf_counter() - start) / count


def compare(
    name: str,
    dtype: torch.dtype,
    ours: Callable[[], object],
    theirs: Callable[[], object],
    rounds: int,
) -> Comparison:
    runs = (ours, theirs)
    counts = []
    for run in runs:
        _once(run, 3)
        counts.append(max(1, int(ROUND_S / _once(run, 3))))
    times = [
        [_once(run, count) for run, count in zip(runs, counts, strict=True)] for _ in range(rounds)
    ]
    return Comparison(
        name=name,
        dtype=str(dtype).removeprefix("torch."),
        ours_us=round(statistics.median(ours for ours, _ in times) * 1e6, 2),
        theirs_us=round(statistics.median(theirs for _, theirs in times) * 1e6, 2),
        speedup=round(statistics.median(theirs / ours for ours, theirs in times), 2),
    )


# --- attention ---------------------------------------------------------------------------------


def attention_step(
    shape: Shape, dtype: torch.dtype, rows: list[tuple[int, int]], backend: BaseAttnBackend
) -> tuple[Tensor, Tensor, Tensor, AttnLayer, PoolBatch]:
    """Return q, k, v, layer and batch of a step. rows: (start, end), over pages of 16 in random
    order."""
    page_size = 16
    per_row = -(-max(end for _, end in rows) // page_size)
    pool = MHAKVCache(
        num_layers=1,
        num_pages=per_row * len(rows),
        page_size=page_size,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=dtype,
        device=CPU,
    )
    pool.layer(0).k.normal_()
    pool.layer(0).v.normal_()
    table = torch.randperm(per_row * len(rows)).int().view(len(rows), per_row)
    starts, ends = [start for start, _ in rows], [end for _, end in rows]
    positions = [torch.arange(start, end) for start, end in rows]
    slots = [
        table[row][at // page_size] * page_size + at % page_size for row, at in enumerate(positions)
    ]
    lengths = np.subtract(ends, starts)
    num_tokens = sum(map(len, slots))
    plan = Plan(
        step=0,
        uids=list(range(len(rows))),
        table_idxs=list(range(len(rows))),
        starts=starts,
        ends=ends,
        token_ids=np.zeros(num_tokens, np.int32),
        num_decodes=0,
        sample_rows=[],
        output_idxs=[],
    )
    batch = PoolBatch(
        positions=torch.cat(positions).int(),
        slots=torch.cat(slots).int(),
        attn_metadata=backend.prepare(plan),
        context=Context(kv_pool=pool, page_table=table, attn=backend),
        rows=torch.tensor(
            np.array((plan.table_idxs, np.cumsum(lengths) - lengths, lengths, ends)),
            dtype=torch.int32,
        ),
    )
    layer = AttnLayer(
        layer_id=0,
        num_q_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        scale=shape.head_dim**-0.5,
    )
    q = torch.randn(num_tokens, shape.num_heads, shape.head_dim).to(dtype)
    k = torch.randn(num_tokens, shape.num_kv_heads, shape.head_dim).to(dtype)
    return q, k, torch.randn_like(k), layer, batch


def gather_then_sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: AttnLayer,
    batch: PoolBatch,
    length: int,
) -> Tensor:
    """Attention by torch for equal rows: gather the cache, then one fused attention."""
    pool = batch.context.kv_pool.layer(0)
    num_rows, table = len(batch.context.page_table), batch.context.page_table
    pool.k.flatten(0, 1)[batch.slots] = k
    pool.v.flatten(0, 1)[batch.slots] = v
    q = q.view(num_rows, -1, layer.num_q_heads, layer.head_dim).transpose(1, 2)
    k, v = (x[table].flatten(1, 2)[:, :length].transpose(1, 2) for x in (pool.k, pool.v))
    mask = None
    if q.shape[2] > 1:
        mask = torch.ones(q.shape[2], length, dtype=torch.bool).tril(length - q.shape[2])
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1)


def attention(rounds: int) -> Iterator[Comparison]:
    backend = create_attention_backend("auto", Ops())
    cases = (
        ("0.6B", "decode 8 x 1,024", [(1023, 1024)] * 8),
        ("0.6B", "decode 1 x 1,024", [(1023, 1024)]),
        ("0.6B", "decode 1 x 8,192", [(8191, 8192)]),
        ("0.6B", "extend 512 over 1,024", [(1024, 1536)]),
        ("0.6B", "extend 16 over 1,024", [(1024, 1040)]),
        ("0.6B", "prefill 1,024", [(0, 1024)]),
        ("tiny", "decode 1 x 128", [(127, 128)]),
        ("tiny", "decode 8 x 128", [(127, 128)] * 8),
        ("tiny", "prefill 128", [(0, 128)]),
    )
    for dtype in (torch.bfloat16, torch.float32):
        for shape, name, rows in cases:
            step = attention_step(SHAPES[shape], dtype, rows, backend)
            length = rows[0][1]
            out = backend.forward(*step)
            other = gather_then_sdpa(*step, length)
            error = ((out - other).abs().max() / other.abs().max()).item()
            assert error < (2e-6 if dtype == torch.float32 else 2e-2), f"{name}: {error}"
            yield compare(
                f"{shape} attention {name}",
                dtype,
                partial(backend.forward, *step),
                partial(gather_then_sdpa, *step, length),
                rounds,
            )


# --- ops ---------------------------------------------------------------------------------------


def op_calls(
    shape: Shape, dtype: torch.dtype, num_tokens: int
) -> dict[str, Callable[[Ops], object]]:
    """Return a call of each op, with data of its own, by name."""
    heads = shape.num_heads + 2 * shape.num_kv_heads
    x = torch.randn(num_tokens, shape.hidden_size).to(dtype)
    residual = torch.randn_like(x)
    weight = torch.randn(shape.hidden_size).to(dtype)
    qkv = torch.randn(num_tokens, heads * shape.head_dim).to(dtype)
    q_end = shape.num_heads * shape.head_dim
    k_end = q_end + shape.num_kv_heads * shape.head_dim
    q = qkv[:, :q_end].view(num_tokens, -1, shape.head_dim)
    k = qkv[:, q_end:k_end].view(num_tokens, -1, shape.head_dim)
    gate_up = torch.randn(num_tokens, 2 * shape.intermediate_size).to(dtype)
    cos_sin = torch.randn(4096, shape.head_dim)
    positions = torch.randint(0, 4096, (num_tokens,), dtype=torch.int32)
    return {
        "rms_norm": lambda ops: ops.rms_norm(x, weight, 1e-6),
        "add_rms_norm": lambda ops: ops.add_rms_norm(x, residual, weight, 1e-6),
        "apply_rope": lambda ops: ops.apply_rope(q, k, cos_sin, positions),
        "silu_and_mul": lambda ops: ops.gated(gate_up, "silu"),
        "gelu_and_mul": lambda ops: ops.gated(gate_up, "gelu_tanh"),
    }


def sample_calls(shape: Shape, num_rows: int) -> dict[str, Callable[[Ops], object]]:
    """Return calls of sampling on bfloat16 logits spread like a model's, by name."""
    logits = (torch.randn(num_rows, shape.vocab_size) * 3).bfloat16()
    seeds, output_idxs = torch.arange(num_rows), torch.arange(num_rows)
    temperatures = torch.full((num_rows,), 0.7)
    plain = BatchSamplingArgs(
        all_greedy=False, temperatures=temperatures, seeds=seeds, output_idxs=output_idxs
    )
    filtered = BatchSamplingArgs(
        all_greedy=False,
        temperatures=temperatures,
        seeds=seeds,
        output_idxs=output_idxs,
        top_ks=torch.full((num_rows,), 50, dtype=torch.int32),
        top_ps=torch.full((num_rows,), 0.95),
    )
    return {
        "sample, greedy": lambda ops: ops.sample(logits, BatchSamplingArgs(all_greedy=True)),
        "sample, temperature": lambda ops: ops.sample(logits, plain),
        "sample, top-k 50, top-p 0.95": lambda ops: ops.sample(logits, filtered),
    }


def ops(rounds: int) -> Iterator[Comparison]:
    fast, reference = create_ops(CPU), Ops()
    for shape_name, shape in SHAPES.items():
        for dtype in (torch.bfloat16, torch.float32):
            for num_tokens in (1, 8, 256):
                for name, call in op_calls(shape, dtype, num_tokens).items():
                    yield compare(
                        f"{shape_name} {name}, T = {num_tokens}",
                        dtype,
                        partial(call, fast),
                        partial(call, reference),
                        rounds,
                    )
        for num_rows in (1, 8):
            for name, call in sample_calls(shape, num_rows).items():
                yield compare(
                    f"{shape_name} {name}, S = {num_rows}",
                    torch.bfloat16,
                    partial(call, fast),
                    partial(call, reference),
                    rounds,
                )


def main(argv: list[str]) -> int:
    parser = benchmark_parser(__name__, __doc__)
    add_json(parser)
    parser.add_argument("--rounds", type=natural, default=15, help="rounds of each comparison")
    parser.add_argument(
        "--threads",
        type=natural,
        default=torch.get_num_threads(),
        help="threads of torch and the kernels",
    )
    parser.add_argument("--only", choices=("attention", "ops"), help="leave out the other")
    args = parser.parse_args(argv)
    load = machine_load()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    suites = {"attention": attention, "ops": ops}
    results = []
    print(f"{'':72s}{'dtype':>9s}{'ours us':>11s}{'torch us':>11s}{'speed-up':>9s}")
    with torch.inference_mode():
        for suite_name, suite in suites.items():
            if args.only not in (None, suite_name):
                continue
            for result in suite(args.rounds):
                results.append(result)
                print(
                    f"{result.name:72s}{result.dtype:>9s}{result.ours_us:11.1f}"
                    f"{result.theirs_us:11.1f}{result.speedup:9.2f}"
                )
    if args.json:
        found = [asdict(result) for result in results]
        settings = {"threads": args.threads, "rounds": args.rounds}
        write_json(args.json, {"load_before": load, **settings, "results": found})
    return 0
