"""Sampling on a GPU by our kernels, plain torch and FlashInfer, beside reading the logits once.

Each runs in a CUDA graph, in rounds, on logits spread like a model's. Our ids must equal those of
plain torch, which sorts the vocabulary. FlashInfer (package flashinfer-python) draws other noise;
its time includes the conversion to float32 and the softmax that it needs, and for top-k with top-p
it is the faster of its two orders.

Axes: S rows that sample, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minisgl.benchmark.perf import captured, interleaved_s, need_gpu
from minisgl.core import BatchSamplingArgs
from minisgl.kernel.ops import Ops
from minisgl.kernel.registry import create_ops
from minisgl_bench.arguments import add_json, benchmark_parser, naturals
from minisgl_bench.card import card_rates
from minisgl_bench.report import machine_load, write_json

ROWS = (1, 16, 64, 256)
VOCAB = 151_936  # Qwen's
TEMPERATURE, TOP_K, TOP_P = 0.6, 20, 0.95  # Qwen3's own
KINDS = ("greedy", "temperature", "top-p", "top-k", "top-k, top-p")

Choose = Callable[[], Tensor]
"""Returns token ids [S]."""


def sampling_args(kind: str, num_rows: int, device: torch.device) -> BatchSamplingArgs:
    if kind == "greedy":
        return BatchSamplingArgs(all_greedy=True)

    def all_rows(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((num_rows,), value, dtype=dtype, device=device)

    return BatchSamplingArgs(
        all_greedy=False,
        temperatures=all_rows(TEMPERATURE),
        top_ks=all_rows(TOP_K, torch.int32) if "top-k" in kind else None,
        top_ps=all_rows(TOP_P) if "top-p" in kind else None,
        seeds=torch.arange(num_rows, device=device),
        output_idxs=torch.arange(num_rows, device=device),
    )


def flashinfer_choices(kind: str, logits_SV: Tensor) -> dict[str, Choose]:
    """Return FlashInfer's samplers by name; none for greedy rows. Raises ImportError."""
    import flashinfer.sampling as theirs

    def probabilities() -> Tensor:
        softmax: Tensor = theirs.softmax(logits_SV.float(), TEMPERATURE)
        return softmax

    if kind == "temperature":
        return {"flashinfer": lambda: theirs.sampling_from_probs(probabilities())}
    if kind == "top-p":
        return {"flashinfer": lambda: theirs.top_p_sampling_from_probs(probabilities(), TOP_P)}
    if kind == "top-k":
        return {"flashinfer": lambda: theirs.top_k_sampling_from_probs(probabilities(), TOP_K)}
    if kind == "top-k, top-p":

        def both(order: str) -> Tensor:
            ids_S: Tensor = theirs.top_k_top_p_sampling_from_probs(
                probabilities(), TOP_K, TOP_P, filter_apply_order=order
            )
            return ids_S

        return {order: partial(both, order) for order in ("top_k_first", "joint")}
    return {}


def measure(kind: str, num_rows: int, copy_tb_s: float, device: torch.device) -> dict[str, Any]:
    """Return one row of the result: microseconds by sampler."""
    torch.manual_seed(num_rows)
    logits_SV = (torch.randn(num_rows, VOCAB, device=device) * 3).bfloat16()
    args = sampling_args(kind, num_rows, device)
    fast, plain = create_ops(device), Ops()
    ours, got_S = captured(lambda: fast.sample(logits_SV, args))
    theirs, want_S = captured(lambda: plain.sample(logits_SV.float(), args))
    torch.cuda.synchronize()
    assert torch.equal(got_S, want_S), f"{kind}, {num_rows} rows: not the tokens of plain torch"
    row: dict[str, Any] = {"sampling": kind, "rows": num_rows}
    row["floor_us"] = round(logits_SV.nbytes / copy_tb_s / 1e6, 1)
    runs = {"ours": ours, "torch": theirs}
    try:
        for name, choose in flashinfer_choices(kind, logits_SV).items():
            runs[name] = captured(choose)[0]
    except ImportError as reason:
        row["missing"] = str(reason)
    times = {name: round(seconds * 1e6, 1) for name, seconds in interleaved_s(runs).items()}
    row["us"], row["torch_us"] = times.pop("ours"), times.pop("torch")
    if times:
        row["flashinfer_us"] = min(times.values())
    return row


def main(argv: list[str]) -> int:
    parser = benchmark_parser(__name__, __doc__)
    add_json(parser)
    parser.add_argument("--rows", type=naturals, default=list(ROWS), help="with commas")
    args = parser.parse_args(argv)
    need_gpu()
    load = machine_load()
    rates = card_rates()
    print(rates)
    print(f"{'':16s}{'rows':>6s}{'ours us':>10s}{'flashinfer':>12s}{'torch':>10s}{'floor':>8s}")
    rows: list[dict[str, Any]] = []
    for kind in KINDS:
        for num_rows in args.rows:
            row = measure(kind, num_rows, rates["copy_tb_s"], torch.device("cuda"))
            rows.append(row)
            print(
                f"{kind:16s}{num_rows:6d}{row['us']:10.1f}{row.get('flashinfer_us', '-'):>12}"
                f"{row['torch_us']:10.1f}{row['floor_us']:8.1f}",
                flush=True,
            )
    if args.json:
        write_json(args.json, {"load_before": load, "rates": rates, "rows": rows})
    return 0
