"""The mixture-of-experts layer of real models beside its floor, and the tuning of its tiles.

On a GPU it times router, routing and experts of one rank with random routing, as CUDA graphs over
the weights of several layers, so that no cache holds them. The floor of T tokens is the larger of
arithmetic (6 D F flops for each of their K experts) and bytes: each expert that is expected to be
touched, E * (1 - (1 - K / E)^T) of them, is read once. On a CPU it times our C++ and the
plain-torch loop in turn; `minisgl.moe.base.CpuMoeBackend` uses the faster one. `--tune` measures
tiles and writes the table of `minisgl.moe.fused`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minisgl.errors import ConfigError
from minisgl.kernel.cpu import CpuOps
from minisgl.kernel.registry import create_ops
from minisgl.moe import BaseMoeBackend, Experts, TorchMoeBackend, create_moe_backend
from minisgl_bench.arguments import add_json, benchmark_parser, names_of, natural, naturals
from minisgl_bench.floor import H200_BANDWIDTH, H200_FLOPS, touched_experts
from minisgl_bench.report import machine_load, write_json
from minisgl_bench.studies.kernels import compare
from minisgl_bench.studies.moe_layers import (
    SHAPES,
    Shape,
    gpu_layers,
    graph_s,
    make_experts,
    make_inputs,
)

GPU_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
CPU_TOKENS = (1, 8, 64, 512)


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
shapes_of = names_of("shape", SHAPES)


def main(argv: Sequence[str]) -> int:
    parser = benchmark_parser(__name__, __doc__)
    parser.add_argument("--shapes", type=shapes_of, help=f"some of {','.join(SHAPES)}")
    parser.add_argument("--tokens", type=naturals, help="counts, with commas between")
    parser.add_argument(
        "--dtypes",
        type=names_of("dtype", DTYPES),
        default="bfloat16",
        help="with commas; on a CPU only",
    )
    parser.add_argument("--rounds", type=natural, default=15, help="rounds, on a CPU")
    parser.add_argument("--tune", type=Path, default=None, help="the table to update")
    add_json(parser)
    args = parser.parse_args(argv)
    gpu = torch.cuda.is_available()
    shapes = args.shapes or shapes_of("qwen3-30b-a3b" if gpu else "small,slice")
    tokens = args.tokens
    if args.tune:
        _check_tunable(gpu)
        from minisgl_bench.studies.moe_tiles import tune

        tune(shapes, tokens or GPU_TOKENS[2:], args.tune)
        return 0
    load = machine_load()
    if gpu:
        rows = [row for name, x in shapes.items() for row in _on_gpu(name, x, tokens or GPU_TOKENS)]
    else:
        rows = [
            row
            for name, x in shapes.items()
            for dtype in args.dtypes.values()
            for row in _on_cpu(name, x, tokens or CPU_TOKENS, dtype, args.rounds)
        ]
    if args.json:
        write_json(args.json, {"load_before": load, "rows": rows})
    return 0


def _check_tunable(gpu: bool) -> None:
    if not gpu:
        raise ConfigError("--tune times Triton's kernels on a GPU, and torch finds none here")
    if find_spec("triton") is None:
        raise ConfigError("--tune needs Triton: pip install 'minisgl[cuda]'")


def floor_s(shape: Shape, tokens: int, itemsize: int = 2) -> float:
    """Return the floor in seconds on an H200 (see the module's docstring)."""
    touched = touched_experts(shape.experts, shape.top_k, tokens)
    flops = 2.0 * shape.expert_params * shape.top_k * tokens
    return max(touched * shape.expert_params * itemsize / H200_BANDWIDTH, flops / H200_FLOPS)


# --- a CPU: beside the loop over experts -------------------------------------------------------


class CppMoeBackend(BaseMoeBackend):
    """All experts in C++, however many tokens they get."""

    ops: CpuOps

    def routed(self, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, experts: Experts) -> Tensor:
        return self.ops.experts(
            x_TD, experts.gate_up_LGD, experts.down_LDF, weights_TK, ids_TK, experts.first
        )


def _on_cpu(
    name: str, shape: Shape, counts: Iterable[int], dtype: torch.dtype, rounds: int
) -> list[dict[str, Any]]:
    ops = create_ops(torch.device("cpu"))
    if not isinstance(ops, CpuOps):
        raise ConfigError(
            "there is no C++ to compare: it did not compile, or MINISGL_DISABLE_JIT=1"
        )
    backend, loop = CppMoeBackend(ops), TorchMoeBackend(ops)
    experts = make_experts(shape, torch.device("cpu"), dtype)
    rows = []
    for tokens in counts:
        x, logits = make_inputs(shape, tokens, torch.device("cpu"), dtype)
        ours, theirs = (
            _call(torch.inference_mode()(b.forward), x, logits, experts) for b in (backend, loop)
        )
        got = compare(f"{name}, {tokens} tokens", dtype, ours, theirs, rounds)
        rows.append(
            {
                "shape": name,
                "tokens": tokens,
                "dtype": got.dtype,
                "ours_us": got.ours_us,
                "loop_us": got.theirs_us,
                "speedup": got.speedup,
            }
        )
        print(
            f"{name:<14}{got.dtype:<10}{tokens:>6} tokens {got.ours_us:>11,.0f} us   "
            f"loop {got.theirs_us:>11,.0f} us   {got.speedup:.2f}x"
        )
    return rows


def _call(run: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    return lambda: run(*args)


# --- a GPU: beside the floor -------------------------------------------------------------------


def _on_gpu(name: str, shape: Shape, counts: Iterable[int]) -> list[dict[str, Any]]:
    device, dtype = torch.device("cuda"), torch.bfloat16
    ops = create_ops(device)
    backend = create_moe_backend(ops, dtype)
    layers = gpu_layers(shape)
    routers = torch.randn(len(layers), shape.experts, shape.hidden, device=device, dtype=dtype)
    rows = []
    for tokens in counts:
        # The router's time counts, but random logits route, so that the ids are even.
        inputs = [make_inputs(shape, tokens, device, dtype) for _ in layers]

        def run(inputs: list[tuple[Tensor, Tensor]] = inputs) -> None:
            for (x, logits), router, experts in zip(inputs, routers, layers, strict=True):
                ops.linear(x, router)
                backend.forward(x, logits, experts)

        seconds = graph_s(run) / len(layers)
        floor = floor_s(shape, tokens)
        rows.append(
            {
                "shape": name,
                "tokens": tokens,
                "us": round(seconds * 1e6, 1),
                "floor_us": round(floor * 1e6, 1),
                "of_floor": round(floor / seconds, 3),
            }
        )
        print(
            f"{name:<22}{tokens:>6} tokens {seconds * 1e6:>9.1f} us   floor "
            f"{floor * 1e6:>8.1f} us   {floor / seconds:.2f} of it",
            flush=True,
        )
    return rows
