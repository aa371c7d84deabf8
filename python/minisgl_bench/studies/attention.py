"""Attention backends of a GPU, beside the bytes they must read or the arithmetic they must do.

Decode runs in CUDA graphs, as in the engine, over the pools of several layers, so that no cache
holds the keys. Prompts run eagerly. Our decode also rotates (by zero degrees) and stores the new
keys and values; other backends do that in a launch that is not timed. Work that is done once a
step for all layers (KV splits, other backends' page tables) is not timed either. Times are medians
by CUDA events, and every output is compared with the first backend's.

Axes: as in `minisgl.attention.paged`.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minisgl.attention import AttnLayer, create_attention_backend
from minisgl.benchmark.perf import captured, events_s
from minisgl.core import Context, Plan, PoolBatch
from minisgl.errors import ConfigError
from minisgl.kernel.registry import create_ops
from minisgl.kvcache.pool import MHAKVCache
from minisgl_bench.arguments import add_json, benchmark_parser
from minisgl_bench.card import card_rates, need_gpu
from minisgl_bench.report import machine_load, write_json

HEADS = ((16, 8), (40, 8), (16, 2))  # Qwen3-0.6B, 14B, 32B on four GPUs
DECODE = [
    *([length] * rows for length in (512, 4096) for rows in (1, 16, 64, 256)),
    list(range(100, 1892, 7)),  # 256 different lengths
    [512] * 28 + [8192] * 4,  # a few long ones among short ones
    [512] * 63 + [32768],
]
PREFILL = [[4096], [4096] * 4]
DECODERS = {"triton": "triton", "fa": "fa", "trtllm": "triton,trtllm"}
PREFILLERS = {"triton": "triton", "fa": "fa", "fa2": "fa2,triton", "fi": "fi,triton"}
HEAD_DIM, PAGE_SIZE, DTYPE = 128, 16, torch.bfloat16
POOL_BYTES = 256 << 20  # all layers: five times the L2 cache of an H200
REPEATS, CALLS = 7, 16
TOLERANCE = 2e-2  # relative to the largest output: bfloat16, sums in another order

Run = Callable[[int], Tensor]
"""Takes the layer's index, returns attention's output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A step. rows: (start, end) of each row's new tokens. layers: the number of pools."""

    heads: tuple[int, int]
    rows: list[tuple[int, int]]
    layers: int
    device: torch.device

    @property
    def is_decode(self) -> bool:
        """Whether each row has one new token."""
        return self.rows[0][1] - self.rows[0][0] == 1

    @property
    def num_bytes(self) -> int:
        """Bytes of all keys and values."""
        tokens = sum(end for _, end in self.rows)
        return tokens * self.heads[1] * HEAD_DIM * DTYPE.itemsize * 2

    @property
    def contexts(self) -> str:
        """The context lengths as a text, such as "512", "28x512+4x8192" or "100..1885"."""
        counts = Counter(end for _, end in self.rows)
        if len(counts) == 1:
            return str(self.rows[0][1])
        if len(counts) > 2:
            return f"{min(counts)}..{max(counts)}"
        return "+".join(f"{count}x{end}" for end, count in counts.items())

    @property
    def flops(self) -> int:
        """FLOPs of both products, below the diagonal."""
        pairs = sum((end * (end + 1) - start * (start + 1)) // 2 for start, end in self.rows)
        return 4 * pairs * self.heads[0] * HEAD_DIM


@dataclass(frozen=True, slots=True, kw_only=True)
class NoTurn:
    """`QKVSteps` that leave queries and keys as they are."""

    layer: AttnLayer
    cos_sin: Tensor
    q_norm_weight: None = None
    k_norm_weight: None = None
    norm_eps: float = 0.0
    by_place: bool = True


class Step:
    """The tensors of one step. Mutable: the pool, which attention reads."""

    def __init__(self, case: Case) -> None:
        rows, device = case.rows, case.device
        num_q, num_kv = case.heads
        self.starts, self.ends = [start for start, _ in rows], [end for _, end in rows]
        self.case, self.num_tokens = case, sum(self.ends) - sum(self.starts)
        self.longest = max(self.ends)
        pages = [-(-end // PAGE_SIZE) for end in self.ends]
        self.pool = MHAKVCache(
            num_layers=case.layers, num_pages=sum(pages), page_size=PAGE_SIZE,
            num_kv_heads=num_kv, head_dim=HEAD_DIM, dtype=DTYPE, device=device,
        )  # fmt: skip
        for i in range(case.layers):
            self.pool.layer(i).k.normal_()
            self.pool.layer(i).v.normal_()
        self.table = torch.zeros(len(rows), max(pages), dtype=torch.int32, device=device)
        order = torch.randperm(sum(pages)).int()
        for row, own in zip(self.table, torch.split(order, pages), strict=True):
            row[: len(own)] = own
        self.q = torch.randn(self.num_tokens, num_q, HEAD_DIM, device=device).to(DTYPE)
        # A prompt's new keys and values, which backends may read instead of the pool.
        self.k, self.v = (
            torch.randn(self.num_tokens, num_kv, HEAD_DIM, device=device).to(DTYPE) for _ in "kv"
        )
        if not case.is_decode:
            self._store()

    def _store(self) -> None:
        slots = self.table[:, :, None].long() * PAGE_SIZE
        slots = (slots + torch.arange(PAGE_SIZE, device=slots.device)).flatten(1)
        slots = slots[:, : self.longest].flatten()
        for i in range(self.case.layers):
            pool = self.pool.layer(i)
            pool.k.flatten(0, 1)[slots], pool.v.flatten(0, 1)[slots] = self.k, self.v

    def _new_slots(self) -> Tensor:
        """int32 [T]: where what a decode step brings is stored; prompts' is already."""
        if not self.case.is_decode:
            return torch.full((self.num_tokens,), -1, dtype=torch.int32, device=self.case.device)
        last = torch.tensor(self.ends, device=self.case.device) - 1
        pages = self.table.gather(1, (last // PAGE_SIZE)[:, None])[:, 0]
        return (pages * PAGE_SIZE + last % PAGE_SIZE).int()

    def ours(self, name: str) -> Run:
        """Return the run of one of our backends. Raises ConfigError if it does not exist here."""
        case, device = self.case, self.case.device
        backend: Any = create_attention_backend(
            name, create_ops(device), device, dtype=DTYPE, head_dim=HEAD_DIM,
            page_size=PAGE_SIZE,
        )  # fmt: skip
        count, length = len(case.rows), self.num_tokens // len(case.rows)
        plan = Plan(
            step=0, uids=list(range(count)), table_idxs=list(range(count)), starts=self.starts,
            ends=self.ends, token_ids=np.zeros(self.num_tokens, np.int32),
            num_decodes=count if case.is_decode else 0, sample_rows=[], output_idxs=[],
        )  # fmt: skip
        rows = np.array([range(count), np.arange(count) * length, [length] * count, self.ends])
        batch = PoolBatch(
            positions=torch.zeros(self.num_tokens, dtype=torch.int32, device=device),
            slots=self._new_slots(),
            attn_metadata=backend.prepare(plan),
            context=Context(kv_pool=self.pool, page_table=self.table, attn=backend),
            rows=torch.from_numpy(rows.astype(np.int32)).to(device),
        )
        layers = [
            AttnLayer(layer_id=i, num_q_heads=case.heads[0], num_kv_heads=case.heads[1],
                      head_dim=HEAD_DIM, scale=HEAD_DIM**-0.5)
            for i in range(case.layers)
        ]  # fmt: skip
        out = torch.empty_like(self.q)
        qkv = torch.cat((self.q.flatten(1), self.k.flatten(1), self.v.flatten(1)), 1)
        cos_sin = torch.zeros(self.longest, HEAD_DIM, device=device)
        cos_sin[:, : HEAD_DIM // 2] = 1

        def run(layer: int) -> Tensor:
            if not case.is_decode:
                backend.extend(self.q, self.k, self.v, layers[layer], batch, out)
                return out
            steps = NoTurn(layer=layers[layer], cos_sin=cos_sin)
            rotated: Tensor | None = backend.decode_qkv(qkv, steps, batch)
            if rotated is not None:
                return rotated.view_as(out)
            backend.decode(self.q, layers[layer], batch, out)
            return out

        return run


def timed_us(run: Run, layers: int, *, in_graph: bool) -> float:
    """Return the microseconds of one call: the median of several timings of all calls."""
    calls = -(-CALLS // layers) * layers if in_graph else layers

    def all_calls() -> None:
        for i in range(calls):
            run(i % layers)

    all_calls()
    torch.cuda.synchronize()
    repeat = captured(all_calls)[0] if in_graph else all_calls
    return statistics.median(events_s(repeat) for _ in range(REPEATS)) * 1e6 / calls


def measure(case: Case, rates: dict[str, float]) -> Iterator[dict[str, Any]]:
    step = Step(case)
    floor = case.num_bytes / rates["copy_tb_s"] / 1e6
    if not case.is_decode:
        floor = case.flops / rates["gemm_tflop_s"] / 1e6
    want: Tensor | None = None
    backends = DECODERS if case.is_decode else PREFILLERS
    for name, full_name in backends.items():
        row: dict[str, Any] = {
            "heads": "/".join(map(str, case.heads)), "rows": len(case.rows),
            "context": case.contexts, "decode": case.is_decode, "backend": name,
            "floor_us": round(floor, 1),
        }  # fmt: skip
        try:
            run = step.ours(full_name)
            got = run(0).float()
            want = got.clone() if want is None else want
            error = float((got - want).abs().max() / want.abs().max())
            assert error < TOLERANCE, f"{name} differs by {error}"
            row["us"] = round(timed_us(run, case.layers, in_graph=case.is_decode), 1)
        except ConfigError as reason:
            row["missing"] = str(reason)
        yield row


def main(argv: list[str]) -> int:
    parser = benchmark_parser(__name__, __doc__)
    add_json(parser)
    every = [f"{q}/{kv}" for q, kv in HEADS]
    parser.add_argument(
        "--heads", nargs="+", choices=every, default=every, help="query/key heads (default: all)"
    )
    args = parser.parse_args(argv)
    need_gpu()
    device = torch.device("cuda")
    load = machine_load()
    rates = card_rates()
    print(f"{rates}")
    print(f"{'heads':>6} {'rows':>5} {'context':>13} {'':8} {'backend':10} {'us':>8} of its floor")
    results = []
    cases = [[(end - 1, end) for end in ends] for ends in DECODE]
    cases += [[(0, end) for end in ends] for ends in PREFILL]
    cuda: Any = torch.cuda  # whose streams have no annotations
    with torch.inference_mode(), cuda.stream(cuda.Stream()):
        for heads in HEADS:
            if "/".join(map(str, heads)) not in args.heads:
                continue
            for rows in cases:
                case = Case(heads=heads, rows=rows, layers=2, device=device)
                if case.is_decode:
                    layers = min(max(-(-POOL_BYTES // case.num_bytes), 2), 64)
                    case = replace(case, layers=layers)
                for row in measure(case, rates):
                    results.append(row)
                    what = "decode" if case.is_decode else "prompt"
                    shown = row.get("missing", "")
                    if "us" in row:
                        shown = f"{row['us']:8.1f} {row['floor_us'] / row['us']:.2f}"
                    print(
                        f"{row['heads']:>6} {row['rows']:>5} {row['context']:>13} {what:8} "
                        f"{row['backend']:10} {shown}",
                        flush=True,
                    )
    if args.json:
        write_json(args.json, {"load_before": load, **rates, "rows": results})
    return 0
