"""The GEMMs of a decoder's layer, by our kernels and by cuBLAS, beside their floor.

A CUDA graph holds the norms, GEMMs and activation of so many layers that the L2 cache has lost
their weights when their turn comes again. A norm of equal size replaces attention. Each GEMM is
also timed alone by cuBLAS, behind others like itself. The floor is that of `benchmark.floor`, GEMM
by GEMM: reading the weights once, or the arithmetic.

Rounds interleave the two, and medians count. Their outputs differ by the rounding of all layers;
more than `TOLERANCE` is an error.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minisgl.benchmark.perf import captured, events_s
from minisgl.kernel.ops import Ops
from minisgl.kernel.registry import create_ops
from minisgl.utils.logger import setup_logging
from minisgl_bench.arguments import add_json, benchmark_parser, names_of, naturals
from minisgl_bench.card import card_rates, need_gpu
from minisgl_bench.floor import gemm_floor_s
from minisgl_bench.report import machine_load, write_json
from minisgl_bench.shapes import SHAPES as MODELS

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": MODELS["qwen3-0.6b"],
    "qwen3-14b": MODELS["qwen3-14b"],
    "qwen3-32b-tp4": {  # one of four ranks' part
        **MODELS["qwen3-32b"],
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "intermediate_size": 6400,
        "vocab_size": 37_984,
    },
}
ROUNDS = 7
ROUND_S = 5e-3  # time of one run in a round; CUDA events resolve 0.5 us
ROWS = (4, 16, 64, 96, 128, 144, 160, 176, 192, 208, 224, 240, 256)
WEIGHT_BYTES = 256 << 20  # one GEMM in all layers: five times the L2 cache of an H200
EPS = 1e-6
TOLERANCE = 5e-2
"""Relative to the outputs' norm. Simulated roundings give 0.0045 for one layer, 0.023 for 64; one
GEMM of 64 layers left out is a tenth of the residual."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The sizes of a decoder's layer without experts. inner: intermediate size."""

    hidden: int
    attended: int
    qkv: int
    inner: int

    @classmethod
    def of(cls, values: dict[str, Any]) -> Layer:
        """Return the layer of a model. values: the content of its config.json."""
        heads, kv_heads = values["num_attention_heads"], values["num_key_value_heads"]
        return cls(
            hidden=values["hidden_size"],
            attended=heads * values["head_dim"],
            qkv=(heads + 2 * kv_heads) * values["head_dim"],
            inner=values["intermediate_size"],
        )

    @property
    def gemms(self) -> dict[str, tuple[int, int]]:
        """(outputs, inputs) of each GEMM, by name."""
        return {
            "qkv": (self.qkv, self.hidden),
            "o": (self.hidden, self.attended),
            "gate_up": (2 * self.inner, self.hidden),
            "down": (self.hidden, self.inner),
        }

    def floors_s(self, rows: int) -> dict[str, float]:
        return {name: gemm_floor_s(rows, n * k) for name, (n, k) in self.gemms.items()}

    def num_copies(self) -> int:
        """The number of layers at which even the smallest GEMM's weights exceed a cache."""
        smallest = min(2 * n * k for n, k in self.gemms.values())
        return -(-WEIGHT_BYTES // smallest)


def main(argv: Sequence[str]) -> int:
    parser = benchmark_parser(__name__, __doc__)
    parser.add_argument(
        "--shapes", type=names_of("shape", SHAPES), default=",".join(SHAPES), help="with commas"
    )
    parser.add_argument("--rows", type=naturals, default=list(ROWS), help="with commas")
    add_json(parser)
    args = parser.parse_args(argv)
    need_gpu()
    setup_logging("gemms")
    load = machine_load()
    rates = card_rates()
    print(rates)
    rows: list[dict[str, Any]] = []
    for name, values in args.shapes.items():
        rows += measure_layer(name, Layer.of(values), args.rows)
    if args.json:
        write_json(args.json, {"load_before": load, **rates, "rows": rows})
    return 0


def measure_layer(name: str, layer: Layer, counts: Sequence[int]) -> Iterator[dict[str, Any]]:
    from minisgl_kernels.ops import TunedOps  # needs Triton, which a CPU's torch lacks

    device, num_layers = torch.device("cuda"), layer.num_copies()
    variants: dict[str, Ops] = {"own": create_ops(device), "cublas": TunedOps()}
    layers = [random_weights(layer, device) for _ in range(num_layers)]
    for rows in counts:
        inputs = {
            size: torch.randn(rows, size, device=device).bfloat16()
            for size in (layer.hidden, layer.attended, layer.inner)
        }
        x, attended = inputs[layer.hidden], inputs[layer.attended]
        torch.cuda.synchronize()  # our gemms fetch weights before they wait
        graphs, outputs = {}, {}
        for key, ops in variants.items():
            graphs[key], outputs[key] = captured(partial(run_layers, ops, layers, x, attended))
        for key, (_, size) in layer.gemms.items():
            weights = [layer_weights[key] for layer_weights in layers]
            run = partial(_run_alone, variants["cublas"], inputs[size], weights)
            graphs[key], _ = captured(run)
        us = {key: s * 1e6 / num_layers for key, s in interleaved_s(graphs).items()}
        floors = {key: s * 1e6 for key, s in layer.floors_s(rows).items()}
        own, cublas = (output.float() for output in outputs.values())
        error = float((own - cublas).norm() / cublas.norm())
        yield _row(name, rows, us, floors, error)
        assert error < TOLERANCE, f"the outputs differ by {error:.3f} of their norm"


def _row(
    name: str, rows: int, us: dict[str, float], floors: dict[str, float], error: float
) -> dict[str, Any]:
    alone, floor = sum(us[key] for key in floors), sum(floors.values())
    print(
        f"{name:<14}{rows:>4} rows   own {us['own']:7.1f} us   cublas {us['cublas']:7.1f}   floor "
        f"{floor:6.1f}   alone {alone:7.1f}, {floor / alone:.2f} of it ("
        + ", ".join(f"{key} {us[key]:.1f}" for key in floors)
        + f")   error {error:.4f}",
        flush=True,
    )
    return {
        "name": f"{name} {rows} rows",
        "own_us": round(us["own"], 1),
        "cublas_us": round(us["cublas"], 1),
        "floor_us": round(floor, 1),
        "cublas_alone_us": {key: round(us[key], 1) for key in floors},
        "floors_us": {key: round(value, 1) for key, value in floors.items()},
        "error": round(error, 4),
    }


def interleaved_s(runs: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Return the median seconds of each run. Rounds interleave the runs, so a drift affects all."""
    counts = {name: max(1, int(ROUND_S / events_s(run))) for name, run in runs.items()}
    rounds = [
        {name: events_s(run, counts[name]) for name, run in runs.items()} for _ in range(ROUNDS)
    ]
    return {name: statistics.median(times[name] for times in rounds) for name in runs}


def random_weights(layer: Layer, device: torch.device) -> dict[str, Tensor]:
    """Return the weights of a layer's GEMMs and of the norms before them."""
    bfloat16: Any = {"device": device, "dtype": torch.bfloat16}
    weights = {
        key: torch.empty(n, k, **bfloat16).normal_(0, k**-0.5)
        for key, (n, k) in layer.gemms.items()
    }
    sizes = {"qkv": layer.hidden, "o": layer.attended, "gate_up": layer.hidden}
    return weights | {f"{key}_norm": torch.ones(n, **bfloat16) for key, n in sizes.items()}


def run_layers(
    ops: Ops, layers: Sequence[dict[str, Tensor]], x: Tensor, attended: Tensor
) -> Tensor:
    """Return the last layer's addition to its residual. attended: attention's output in each
    layer."""
    residual = x
    for w in layers:
        _, residual = ops.norm_linear(x, residual, w["qkv_norm"], EPS, w["qkv"], None)
        x = ops.linear(ops.rms_norm(attended, w["o_norm"], EPS), w["o"])
        x, residual = ops.norm_linear(
            x, residual, w["gate_up_norm"], EPS, w["gate_up"], None, "silu"
        )
        x = ops.linear(x, w["down"])
    return x


def _run_alone(ops: Ops, x: Tensor, weights: Sequence[Tensor]) -> None:
    for weight in weights:
        ops.linear(x, weight)
